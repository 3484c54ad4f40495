#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Trains a GPT-3 of 175B parameters with DiLoCo under SLURM: four workers, each with TP 8 and PP 16 on 16 nodes.
# Submit it from the repository's folder:
#
#   sbatch examples/local_sgd/train_gpt3_diloco_slurm.sh \
#       [--dry-run] [CHECKPOINT_PATH [TENSORBOARD_LOGS_PATH [VOCAB_FILE MERGE_FILE] DATA_PATH]]
#
# Defaults: folders in outputs/gpt3_diloco_slurm_BACKEND, mock data. The paths must be on storage that all nodes share.
# Arguments come before variables. --dry-run, also outside of a job, prints the command line and what it would do
# (docs/explain.md), and starts nothing. With BACKEND=cpu it also starts outside of a SLURM job, on this machine alone.
#
# Environment:
#   BACKEND        gpu, or cpu for the same job at toy size on this machine, by default with 4 processes (gpu)
#   METHOD         diloco, or edit, which adds EDiT's penalty (diloco)
#   TRAIN_ITERS    steps of training (95000; at toy size 20)
#   GPUS_PER_NODE  processes of a node (8)
#   MASTER_PORT    a port of the job's first node (20000 to 29999, by the job's number; outside of a job 29500)
#   VERBOSE        1 to see all that Megatron and torch print, which otherwise is in CHECKPOINT_PATH.log (0)

#SBATCH --job-name=gpt3-diloco
#SBATCH --nodes=64
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log

set -euo pipefail
# sbatch runs a copy of this file from another folder.
ROOT="${SLURM_SUBMIT_DIR:-$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)}"
if [[ ! -f $ROOT/examples/local_sgd/lib/launch.sh ]]; then
    echo "error: $ROOT is not the repository's folder; submit the job from there" >&2
    exit 1
fi
# shellcheck source=examples/local_sgd/lib/launch.sh
source "$ROOT/examples/local_sgd/lib/launch.sh"

answer_help data "$@"
read_dry_run "$@"
set -- ${REST[@]+"${REST[@]}"}

BACKEND="${BACKEND:-gpu}"
if [[ $BACKEND == cpu ]]; then
    GPUS_PER_NODE="${GPUS_PER_NODE:-4}"
else
    GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
fi
if [[ -n ${SLURM_JOB_ID:-} ]]; then
    NUM_NODES="$SLURM_JOB_NUM_NODES"
    mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    MASTER_ADDR="${HOSTS[0]:?scontrol names no host of the job}"
    MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}"
    LAUNCHER=(srun --kill-on-bad-exit=1)
elif [[ $BACKEND == cpu || $DRY_RUN == 1 ]]; then
    NUM_NODES=1
    [[ $BACKEND == cpu ]] || NUM_NODES=64 # of the job that this file asks for
    MASTER_ADDR=localhost
    MASTER_PORT="${MASTER_PORT:-29500}"
    LAUNCHER=()
else
    launch_error "not inside a SLURM job; submit it with sbatch, or try it at toy size with BACKEND=cpu"
fi

read_paths "gpt3_diloco_slurm_$BACKEND" "$@"

DISTRIBUTED_ARGS=(
    --nproc_per_node "$GPUS_PER_NODE"
    --nnodes "$NUM_NODES"
    --master_addr "$MASTER_ADDR"
    --master_port "$MASTER_PORT"
)

GPT_MODEL_ARGS=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto
)

# The global batch is that of all workers together: each takes a quarter of it.
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1536
    --train-iters "${TRAIN_ITERS:-95000}"
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --init-method-std 0.006
    --clip-grad 1.0
    --bf16
    --lr 6.0e-5
    --lr-decay-style cosine
    --min-lr 6.0e-6
    --lr-warmup-fraction .01
    --recompute-activations
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 8
    --pipeline-model-parallel-size 16
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)

LOCAL_SGD_ARGS=(
    --use-local-sgd
    --local-sgd-workers 4
    --local-sgd-sync-interval 500
    --local-sgd-warmup-steps 2000
    --outer-optimizer sgd
    --outer-optimizer-lr 0.7
    --outer-optimizer-momentum 0.9
    --outer-optimizer-nesterov
)

set_data_args

EVAL_AND_LOGGING_ARGS=(
    --log-interval 100
    --save-interval 5000
    --eval-interval 1000
    --eval-iters 10
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --tensorboard-dir "$TENSORBOARD_LOGS_PATH"
)

choose_backend
choose_method
read_extra_args
find_python

# One task per node, which starts one process per GPU. SLURM_NODEID is known inside of the task only.
# Megatron's own script needs no change: torchrun ... -m megatron_ext /path/to/Megatron-LM/pretrain_gpt.py ...
# shellcheck disable=SC2016 # the task expands it
start_job "$CHECKPOINT_PATH.log" "${LAUNCHER[@]}" bash -c 'exec torchrun --node_rank "${SLURM_NODEID:-0}" "$@"' torchrun \
    "${DISTRIBUTED_ARGS[@]}" "$ROOT/examples/pretrain_gpt.py" \
    "${GPT_MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    "${LOCAL_SGD_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "${EVAL_AND_LOGGING_ARGS[@]}" \
    ${EXTRA[@]+"${EXTRA[@]}"}
