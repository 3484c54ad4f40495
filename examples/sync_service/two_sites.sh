#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Two sites with a slow link between them, on one machine: each is a network namespace, the link a pair of virtual devices of
# limited rate. The server and one Megatron job are at site A, another job at site B, which reaches the server by TLS and a token.
# Needs root (namespaces), ip, tc and openssl, and no GPU; run it in the environment that has this package.
#
#   two_sites.sh
#
# Environment:
#   RATE      of the link, each way, as tc has it (100mbit)
#   CODEC     how contributions travel: fp32, bf16, fp16, fp8, int8, int4, topk or topk2 (fp32)
#   DELAY     steps that a job makes while its round is in flight (0)
#   INTERVAL  steps between two rounds (10)
#   ROUNDS    number of rounds (4)
#   OUTPUT    folder of certificates, logs and checkpoints, which must not exist (outputs/two_sites)

set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"
# shellcheck source=examples/local_sgd/lib/launch.sh
source "$ROOT/examples/local_sgd/lib/launch.sh"

answer_help alone "$@"
(($# == 0)) || launch_error "takes no arguments, but was given: $*; see --help"
RATE="${RATE:-100mbit}" CODEC="${CODEC:-fp32}" DELAY="${DELAY:-0}" INTERVAL="${INTERVAL:-10}" ROUNDS="${ROUNDS:-4}"
OUTPUT="${OUTPUT:-$ROOT/outputs/two_sites}"
make_absolute OUTPUT
((EUID == 0)) || launch_error "namespaces need root"
for program in ip tc openssl torchrun megatron-ext; do
    command -v "$program" >/dev/null || launch_error "$program is not on the PATH"
done
[[ ! -e $OUTPUT ]] || launch_error "$OUTPUT exists; remove it or give another OUTPUT"
mkdir -p "$OUTPUT"
cd "$OUTPUT"

# The authority of this run, and the server's certificate for its address.
openssl req -x509 -newkey rsa:2048 -nodes -days 30 -subj "/CN=two sites" -keyout ca.key -out ca.pem 2>openssl.log
openssl req -newkey rsa:2048 -nodes -subj "/CN=server" -keyout server.key -out server.csr 2>>openssl.log
openssl x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 30 -out server.pem \
    -extfile <(echo "subjectAltName=IP:10.77.0.1") 2>>openssl.log
openssl rand -hex 16 >token

# Two namespaces and a link. Each end sends at RATE.
A="site-a-$$" B="site-b-$$"
server=""
clean_up() {
    [[ -z $server ]] || kill "$server" 2>/dev/null || true
    wait 2>/dev/null || true
    ip netns del "$A" 2>/dev/null || true
    ip netns del "$B" 2>/dev/null || true
}
trap clean_up EXIT
ip netns add "$A" && ip netns add "$B"
ip -n "$A" link add wan type veth peer name wan netns "$B"
for site in "$A 10.77.0.1" "$B 10.77.0.2"; do
    read -r name address <<<"$site"
    ip -n "$name" addr add "$address/24" dev wan
    ip -n "$name" link set lo up && ip -n "$name" link set wan up
    tc -n "$name" qdisc add dev wan root tbf rate "$RATE" burst 64kb latency 50ms
done

ip netns exec "$A" megatron-ext server start --dir state --bind 10.77.0.1:50051 --peers 2 --run wan --outer-optimizer sgd \
    --tls-cert server.pem --tls-key server.key --token-file token >server.log 2>&1 &
server=$!

# peer NAMESPACE NAME: one job, an ordinary Megatron command line with the peer's flags at the end.
peer() {
    ip netns exec "$1" env GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 torchrun --nproc-per-node 1 --master-addr 127.0.0.1 \
        "$ROOT/examples/pretrain_gpt.py" \
        --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 \
        --mock-data --tokenizer-type NullTokenizer --vocab-size 1023 --transformer-impl local \
        --micro-batch-size 4 --global-batch-size 4 --train-iters $((INTERVAL * ROUNDS)) --lr 1e-3 --lr-warmup-iters 5 \
        --log-interval "$INTERVAL" --eval-interval 100000 --eval-iters 1 \
        --sync-service 10.77.0.1:50051 --sync-service-tls-ca ca.pem --sync-service-token-file token \
        --sync-service-run wan --sync-service-peers 2 --sync-service-peer "$2" \
        --sync-service-interval "$INTERVAL" --sync-service-codec "$CODEC" --sync-service-delay "$DELAY" >"$2.log" 2>&1
}
peer "$A" near &
near=$!
peer "$B" far || launch_error "the job at site B failed; see $OUTPUT/far.log"
wait "$near" || launch_error "the job at site A failed; see $OUTPUT/near.log"

echo "link of $RATE, $CODEC, $ROUNDS rounds of $INTERVAL steps, delay $DELAY"
ip netns exec "$A" megatron-ext server status --server 10.77.0.1:50051 --token-file token --tls-ca ca.pem
sed -nE 's/.* iteration +([0-9]+).*(elapsed time[^|]*).*(sync round: [1-9].*) \|/site B, iteration \1: \2| \3/p' far.log
for name in "$A" "$B"; do
    echo "sent over the link by ${name%-*}: $(tc -n "$name" -s qdisc show dev wan | awk '/Sent/ {printf "%.2f MB", $2 / 1e6}')"
done
