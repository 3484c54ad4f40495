# SPDX-License-Identifier: Apache-2.0
"""A configuration of SPES' own code, in the words of Megatron's command line and ours.

Every key of the file is accounted for: it becomes flags, or is one whose value changes nothing here, or is named with
what is different here, or refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ext.errors import combine

__all__ = ["Translation", "flatten", "translate"]

_MISSING = object()
_DEFAULTS = {"spes_config.peer_id": 0}
"""Of keys that others name."""

_VARIABLE = re.compile(r"\$\{([\w.]+)\}")

_CHANGES_NOTHING = frozenset(
    {
        "auxiliary_loss_multiplier",
        "compile",
        "data.drop_last",
        "data.num_workers",
        "data.pad_direction",
        "data.persistent_workers",
        "data.pin_memory",
        "data.prefetch_factor",
        "data.timeout",
        "ddp.find_unused_params",
        "ddp.grad_sync_mode",
        "device_eval_batch_size",
        "dry_run",
        "eval_subset_num_batches",
        "fsdp.precision",
        "fsdp.sharding_strategy",
        "fsdp.use_orig_params",
        "fsdp.wrapping_strategy",
        "fused_loss",
        "max_grad_norm_ratio",
        "model.eos_token_id",
        "model.flash_attention",
        "model.init_device",
        "model.moe_log_expert_assignment",
        "model.moe_mlp_impl",
        "model.pad_token_id",
        "model.using_custom_moe_impl",
        "no_pre_train_checkpoint",
        "optimizer.metrics_log_interval",
        "reset_optimizer_state",
        "reset_trainer_state",
        "restore_dataloader",
        "save_interval_ephemeral",
        "save_num_checkpoints_to_keep",
        "save_num_unsharded_checkpoints_to_keep",
        "save_overwrite",
        "sharded_checkpointer",
        "speed_monitor.window_size",
        "spes_config.quant_non_local_trainable_experts",
        "tokenizer.truncate_direction",
        "wandb.group",
        "wandb.log_interval",
    }
)
"""How it is computed, logged and kept, which Megatron has its own ways for; or what has no effect there either."""

_ONLY: Mapping[str, tuple[Any, ...]] = {
    "model.alibi": (False,),
    "model.rope": (True,),
    "model.block_type": ("moe",),
    "model.layer_norm_type": ("rms",),
    "model.layer_norm_with_affine": (True,),
    "model.bias_for_layer_norm": (False,),
    "model.attention_layer_norm_with_affine": (True,),
    "model.activation_type": ("swiglu",),
    "model.moe_dropless": (True,),
    "model.init_fn": ("normal",),
    "optimizer.name": ("adamw",),
    "scheduler.name": ("cosine_with_warmup",),
    "scheduler.units": ("steps",),
    "precision": ("amp_bf16", "fp32"),
    "distributed_strategy": ("fsdp", "ddp", "single"),
    "activation_checkpointing": ("fine_grained", "whole_layer", None),
    "data.memmap_dtype": ("uint16", "uint32"),
}
"""Keys that translate at these values alone."""

_VALUES: Mapping[str, str] = {
    "seed": "--seed",
    "model.d_model": "--hidden-size",
    "model.n_heads": "--num-attention-heads",
    "model.n_layers": "--num-layers",
    "model.rope_theta": "--rotary-base",
    "model.attention_dropout": "--attention-dropout",
    "model.layer_norm_eps": "--norm-epsilon",
    "model.init_std": "--init-method-std",
    "model.moe_top_k": "--moe-router-topk",
    "model.moe_num_experts": "--num-experts",
    "model.moe_zloss_weight": "--moe-z-loss-coeff",
    "model.moe_loss_weight": "--moe-aux-loss-coeff",
    "optimizer.learning_rate": "--lr",
    "optimizer.eps": "--adam-eps",
    "optimizer.weight_decay": "--weight-decay",
    "scheduler.t_warmup": "--lr-warmup-iters",
    "scheduler.t_max": "--lr-decay-iters",
    "global_train_batch_size": "--global-batch-size",
    "device_train_microbatch_size": "--micro-batch-size",
    "max_grad_norm": "--clip-grad",
    "save_interval": "--save-interval",
    "eval_interval": "--eval-interval",
    "save_folder": "--save",
    "load_path": "--load",
    "wandb.project": "--wandb-project",
    "wandb.name": "--wandb-exp-name",
    "spes_config.server_addr": "--sync-service",
    "spes_config.peer_id": "--sync-service-index",
    "spes_config.num_train_experts_per_node": "--spes-num-train-experts-per-node",
    "spes_config.sync_steps": "--sync-service-interval",
    "spes_config.decayed_factor_update_steps": "--spes-decayed-factor-update-steps",
}
"""Keys that are a flag each."""

_SWITCHES: Mapping[str, str] = {
    "using_spes": "--using-spes",
    "using_dilico": "--using-dilico",
    "spes_config.using_decayed_aux_loss": "--spes-using-decayed-aux-loss",
    "model.attention_layer_norm": "--qk-layernorm",
}
"""Keys that are a flag where they are true."""


@dataclass(frozen=True, kw_only=True)
class Translation:
    """What a configuration is here."""

    peer: tuple[str, ...]
    """Flags of one peer's Megatron job."""

    server: tuple[str, ...]
    """Arguments of ``megatron-ext server start``; empty without SPES."""

    notes: tuple[str, ...]
    """What is different here, or remains to be given, one sentence each."""


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a file's values by their dotted keys, ``${...}`` replaced; lists are values."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    if not prefix:
        for key, value in flat.items():
            if isinstance(value, str):
                flat[key] = _VARIABLE.sub(lambda found: str({**_DEFAULTS, **flat}.get(found[1], found[0])), value)
    return flat


def translate(flat: Mapping[str, Any], peers: int | None = None, ignored: Iterable[str] = ()) -> Translation:
    """Return what a configuration of SPES' own code is here.

    Args:
        flat: its values by dotted keys, see `flatten`.
        peers: of the run; None for what the file says, which SPES' own code does not look at.
        ignored: keys to leave out of account.

    Raises:
        UserError: naming every key that is unknown, and every value that does not translate.
    """
    left = {key: value for key, value in flat.items() if key not in set(ignored)}
    notes: list[str] = []
    problems = [
        f"{key} is {left[key]!r}, and only {' or '.join(map(repr, values))} translates"
        for key, values in _ONLY.items()
        if left.get(key, values[0]) not in values
    ]
    peer: list[str] = ["--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu"]
    for rule in (_sizes, _norms, _losses, _optimizer, _parallel, _data, _service):
        rule(left, peer, notes, problems)
    for key, flag in _VALUES.items():
        value = left.pop(key, None)
        if value is not None:
            peer += [flag, _text(value)]
    for key, flag in _SWITCHES.items():
        if left.pop(key, False):
            peer.append(flag)
    uses_service = "--using-spes" in peer
    count = left.pop("spes_config.num_peers", None) if peers is None else peers
    left.pop("spes_config.num_peers", None)
    server: list[str] = []
    if uses_service:
        server = _server(flat, count, peer, notes, problems)
    unknown = sorted(left.keys() - _CHANGES_NOTHING - _ONLY.keys())
    problems += [f"{key} ({left[key]!r}) is unknown here; --ignore {key} leaves it out" for key in unknown]
    if problems:
        raise combine(problems, "SPES configuration")
    return Translation(peer=tuple(peer), server=tuple(server), notes=tuple(notes))


_Left = dict[str, Any]
_Lines = list[str]


def _sizes(left: _Left, peer: _Lines, notes: _Lines, problems: _Lines) -> None:
    ratio = left.pop("model.mlp_ratio", None)
    both = left.pop("model.mlp_hidden_size", None)
    both = int(ratio * left.get("model.d_model", 0)) if both is None and ratio is not None else both
    if not both:
        problems.append("model.mlp_hidden_size and model.mlp_ratio are missing; one says how wide an expert is")
    else:
        # There it is the width of gate and values together.
        peer += ["--ffn-hidden-size", str(both // 2)]
    groups = left.pop("model.n_kv_heads", None)
    if groups is not None and groups != left.get("model.n_heads"):
        peer += ["--group-query-attention", "--num-query-groups", str(groups)]
    length = left.pop("model.max_sequence_length", None)
    if length is None:
        problems.append("model.max_sequence_length is missing")
    else:
        peer += ["--seq-length", str(length), "--max-position-embeddings", str(length)]
    rows, tokens = left.pop("model.embedding_size", None), left.pop("model.vocab_size", None)
    if rows or tokens:
        peer += ["--padded-vocab-size", str(rows or tokens)]
        notes.append(f"--padded-vocab-size {rows or tokens}: TP has to divide it; otherwise give a larger number")
    if not left.pop("model.weight_tying", False):
        peer.append("--untie-embeddings-and-output-weights")
    if not left.pop("model.include_bias", False):
        peer.append("--disable-bias-linear")
    residual, embedding = left.pop("model.residual_dropout", 0.0), left.pop("model.embedding_dropout", 0.0)
    if residual != embedding:
        problems.append(f"model.residual_dropout is {residual}, model.embedding_dropout {embedding}; Megatron has one")
    peer += ["--hidden-dropout", _text(residual)]
    if left.pop("model.init_cutoff_factor", None) is not None:
        notes.append("model.init_cutoff_factor: Megatron's normal distribution is not cut off")


def _norms(left: _Left, peer: _Lines, notes: _Lines, problems: _Lines) -> None:
    over_head = left.pop("model.attention_layer_norm_over_head", False)
    if left.get("model.attention_layer_norm", False) and not over_head:
        notes.append("model.attention_layer_norm: there over all heads, Megatron's --qk-layernorm is head by head")
    # Without a softmax over those chosen the weights of a token's experts do not sum to one.
    if not left.pop("model.moe_normalize_expert_weights", None):
        peer.append("--moe-router-pre-softmax")


def _losses(left: _Left, peer: _Lines, notes: _Lines, problems: _Lines) -> None:
    if left.pop("softmax_auxiliary_loss", False):
        notes.append("softmax_auxiliary_loss: Megatron has no z-loss on the output's logits")
    peer += ["--moe-router-load-balancing-type", "aux_loss"]


def _optimizer(left: _Left, peer: _Lines, notes: _Lines, problems: _Lines) -> None:
    betas = left.pop("optimizer.betas", None)
    if betas is not None:
        peer += ["--adam-beta1", _text(betas[0]), "--adam-beta2", _text(betas[1])]
    if left.pop("optimizer.decay_norm_and_bias", False):
        if left.get("model.attention_layer_norm", False):
            peer.append("--apply-wd-to-qk-layernorm")
        notes.append("optimizer.decay_norm_and_bias: Megatron decays no other norm than those of queries and keys")
    if not left.pop("optimizer.decay_embeddings", True):
        problems.append("optimizer.decay_embeddings is false, and Megatron decays embeddings")
    peer += ["--lr-decay-style", "cosine"]
    lowest = left.pop("scheduler.alpha_f", None)
    if lowest is not None:
        peer += ["--min-lr", _text(lowest * left.get("optimizer.learning_rate", 0.0))]
    stop, longest = left.pop("stop_at", None), left.pop("max_duration", None)
    if not isinstance(stop or longest, int):
        problems.append(f"stop_at is {stop!r} and max_duration {longest!r}; one has to be a number of steps")
    else:
        peer += ["--train-iters", str(min(number for number in (stop, longest) if number))]


def _parallel(left: _Left, peer: _Lines, notes: _Lines, problems: _Lines) -> None:
    if left.get("precision", "amp_bf16") == "amp_bf16":
        peer.append("--bf16")
    if left.get("distributed_strategy") == "fsdp":
        peer += ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    recompute = left.get("activation_checkpointing")
    if recompute == "fine_grained":
        peer += ["--recompute-granularity", "selective"]
    elif recompute == "whole_layer":
        peer += ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    whole = left.pop("save_interval_unsharded", None)
    left.setdefault("save_interval", whole)
    if left.pop("try_load_latest_save", False):
        peer += ["--load", str(left.get("save_folder", ""))]
        left.pop("load_path", None)
    if left.pop("evaluators", None):
        notes.append("evaluators: not during training here; `megatron-ext evaluate --tasks` afterwards")


def _data(left: _Left, peer: _Lines, notes: _Lines, problems: _Lines) -> None:
    kind = left.get("data.memmap_dtype", "uint16")
    if left.pop("data.paths", None):
        notes.append(
            f"data.paths: `megatron-ext data prepare --format tokens --token-dtype {kind} FILES --output-prefix "
            "PREFIX` makes of the .npy files what --data-path PREFIX reads"
        )
    if left.pop("tokenizer.identifier", _MISSING) is not _MISSING:
        notes.append("tokenizer.identifier: --tokenizer-type HuggingFaceTokenizer --tokenizer-model FOLDER")
    if left.pop("data.seed", _MISSING) is not _MISSING:
        notes.append("data.seed: peers take disjoint parts of one order here, by --sync-service-index")
    if [key for key in list(left) if key.startswith("data.instance_filter.") and left.pop(key) is not None]:
        notes.append("data.instance_filter: Megatron leaves no repetitive sequences out; filter the corpus beforehand")


def _service(left: _Left, peer: _Lines, notes: _Lines, problems: _Lines) -> None:
    run = left.pop("run_name", None)
    if left.get("using_spes"):
        peer += ["--sync-service-run", str(run or "spes")]
        place = left.get("spes_config.peer_id", 0)
        peer += ["--sync-service-peer", f"node{place}"]


def _server(
    flat: Mapping[str, Any], count: int | None, peer: _Lines, notes: _Lines, problems: _Lines
) -> list[str]:
    """The server's arguments; adds the number of peers to the peer's."""
    experts, each = flat.get("model.moe_num_experts"), flat.get("spes_config.num_train_experts_per_node", 1)
    if flat.get("using_dilico"):
        each = experts
    elif isinstance(experts, int) and count is not None and experts != each * count:
        fits = experts // each if isinstance(each, int) and each and experts % each == 0 else None
        way = f"; {fits} fit" if fits else ""
        problems.append(
            f"spes_config.num_peers is {count}, and {experts} experts are not {count} times "
            f"spes_config.num_train_experts_per_node {each}{way}: --peers says how many there are"
        )
    if count is None:
        problems.append("spes_config.num_peers is missing; --peers says how many there are")
        return []
    peer += ["--sync-service-peers", str(count)]
    address = str(flat.get("spes_config.server_addr") or "127.0.0.1:50051")
    server = ["--bind", address, "--run", str(flat.get("run_name") or "spes"), "--peers", str(count)]
    server += ["--sync-steps", str(flat.get("spes_config.sync_steps", 100))]
    if flat.get("using_dilico"):
        notes.append("using_dilico: experts are averaged here; SPES' own server takes those of the first peer")
    else:
        server += ["--merge-interval", "500", "--merge-alpha-start", "0.01", "--merge-decay-steps", "10000"]
        notes.append("--merge-*: the defaults of SPES' own server; its file has no such keys")
    if not address.startswith(("127.", "localhost")):
        notes.append("--bind: an address that others reach asks for --token-file, --tls-cert and --tls-key")
    return server



def _text(value: Any) -> str:
    # YAML 1.1 reads 1e-6 as a word.
    number = float(value) if isinstance(value, str) and re.fullmatch(r"[\d.]+e-?\d+", value) else value
    return f"{number:.10g}" if isinstance(number, float) else str(number)
