# SPDX-License-Identifier: Apache-2.0
"""The same training twice: by real peers in Megatron's loop at a real sync server, and by replicas in this process."""

from __future__ import annotations

import argparse
import functools
import re
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.convergence.settings import VOCABULARY
from benchmarks.server_process import server_of
from benchmarks.spes_method.model import Sizes, of_megatron
from benchmarks.spes_method.training import Adam, Method, block_owners, train, validation_loss
from tests.support.presets import MOE, Options, toy_gpt
from tests.support.pretrain import run_pretrain

__all__ = ["Compared", "Comparison", "compare_with_peers", "largest_differences"]

_VALIDATION = re.compile(r"validation loss at iteration \d+ on validation set.*lm loss value: ([\d.E+-]+)")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is trained twice."""

    sizes: Sizes
    adam: Adam
    interval: int
    """Steps between two rounds."""
    corpus: Path
    """Prefix of a tokenized corpus."""
    peers: int = 4
    owners: int = 1
    """Of every expert."""
    sequences: int = 8
    """Of a peer's step."""
    validated: int = 64
    """Sequences of the validation at the end, a multiple of a step's."""
    seed: int = 1
    timeout: float = 3600.0
    """Seconds for all of a peer's training."""

    @property
    def method(self) -> Method:
        """How the replicas train."""
        return Method(owners=block_owners(self.peers, self.sizes.experts, self.owners), interval=self.interval)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Samples for training, validation and test that a job asks Megatron for."""
        return self.adam.steps * self.sequences * self.peers, self.validated, self.validated

    def options(self, peer: int, address: str, cache: Path) -> list[str]:
        """Return a peer's command line.

        Args:
            peer: which one.
            address: of the server.
            cache: folder of its index files.
        """
        sizes, adam = self.sizes, self.adam
        model: Options = {
            **MOE,
            "num_layers": sizes.layers,
            "hidden_size": sizes.hidden,
            "num_attention_heads": sizes.heads,
            "num_experts": sizes.experts,
            "moe_router_topk": sizes.chosen,
            "ffn_hidden_size": sizes.width,
            "moe_aux_loss_coeff": sizes.balance,
            "seq_length": sizes.context,
            "max_position_embeddings": sizes.context,
            "vocab_size": VOCABULARY,
            "position_embedding_type": "rope",
            "no_rope_fusion": True,
            "normalization": "RMSNorm",
            "swiglu": True,
            "disable_bias_linear": True,
        }
        training: Options = {
            "micro_batch_size": self.sequences,
            "global_batch_size": self.sequences,
            "train_iters": adam.steps,
            "lr": adam.rate,
            "min_lr": adam.least,
            "lr_decay_style": "cosine",
            "lr_warmup_iters": adam.warmup,
            "weight_decay": adam.decay,
            "adam_beta1": adam.betas[0],
            "adam_beta2": adam.betas[1],
            "clip_grad": adam.clip,
            "seed": self.seed,
            "eval_interval": adam.steps + 1,
            "eval_iters": self.validated // self.sequences,
        }
        data: Options = {
            "mock_data": None,
            "data_path": str(self.corpus),
            "data_cache_path": str(cache),
            "split": _SPLIT,
        }
        owned = {
            "spes_expert_owners": [
                ",".join(str(owner) for owner in range(self.peers) if self.method.owners[owner, expert])
                for expert in range(sizes.experts)
            ]
        }
        where: Options = {
            "using_spes": True,
            **owned,
            "sync_service": address,
            "sync_service_index": peer,
            "sync_service_peers": self.peers,
            "sync_service_interval": self.interval,
        }
        return toy_gpt(model, training, data, where)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What both trainings measured."""

    peers: list[list[float]]
    """Losses of every step, by peer."""
    replicas: list[list[float]]
    """Likewise."""
    disturbed: list[list[float]]
    """Of replicas whose first weights were changed by a ten-millionth: how far rounding errors lead apart."""
    interval: int
    peers_validation: float
    """Of the weights after the last round."""
    replicas_validation: float
    disturbed_validation: float

    def differences(self, rounds: int) -> float:
        """Return the largest difference of a peer's loss and its replica's in the first rounds."""
        return max(largest_differences(self.peers, self.replicas)[: rounds * self.interval])

    @property
    def validation_difference(self) -> float:
        """By how much of the peers' validation loss the replicas' is another one."""
        return abs(self.replicas_validation / self.peers_validation - 1)


def largest_differences(left: list[list[float]], right: list[list[float]]) -> list[float]:
    """Return of every step the largest difference between two trainings' losses, over the peers."""
    return [
        max(abs(one - other) for one, other in zip(*both, strict=True)) for both in zip(left, right, strict=True)
    ]


_SPLIT = "95,5,0"


def compare_with_peers(comparison: Comparison) -> Compared:
    """Train both ways.

    Raises:
        RuntimeError: peers ended with different validation losses.
    """
    with tempfile.TemporaryDirectory() as folder:
        losses, validation, start = _train_peers(comparison, Path(folder))
        training, held_out = _stock_data(comparison, Path(folder) / "index")
    sizes = replace(comparison.sizes, vocabulary=len(start["embedding"]))
    samples = torch.stack([held_out(number) for number in range(comparison.validated)])

    def trained(weights: Mapping[str, Tensor]) -> tuple[list[list[float]], float]:
        found = train(weights, sizes, comparison.method, comparison.adam, partial(_batch, comparison, training))
        return found.losses, validation_loss(found.weights, samples, sizes)

    replicas, disturbed = trained(start), trained({name: value * (1 + 1e-7) for name, value in start.items()})
    return Compared(
        peers=losses,
        replicas=replicas[0],
        disturbed=disturbed[0],
        interval=comparison.interval,
        peers_validation=validation,
        replicas_validation=replicas[1],
        disturbed_validation=disturbed[1],
    )


def _batch(comparison: Comparison, sample: Callable[[int], Tensor], step: int) -> Tensor:
    """Return the tokens of all peers at a step: of n peers, peer i has every n-th sample from the i-th on."""
    first = step * comparison.sequences
    return torch.stack(
        [
            torch.stack(
                [sample((first + place) * comparison.peers + peer) for place in range(comparison.sequences)]
            )
            for peer in range(comparison.peers)
        ]
    )


def _train_peers(comparison: Comparison, folder: Path) -> tuple[list[list[float]], float, dict[str, Tensor]]:
    """Return the peers' losses, their validation loss at the end, and the weights that they began with."""
    server = {"peers": comparison.peers, "sync_steps": comparison.interval}
    with server_of(folder, {"spes": server}) as running, ThreadPoolExecutor(comparison.peers) as pool:
        jobs = [
            pool.submit(
                run_pretrain,
                comparison.options(peer, running.address, folder / f"cache-{peer}"),
                1,
                before=partial(_remember_start, str(folder / f"start-{peer}.pt")),
                timeout=comparison.timeout,
            )
            for peer in range(comparison.peers)
        ]
        ranks = [job.result()[0] for job in jobs]
    validations = {float(_VALIDATION.findall(rank.stdout)[-1]) for rank in ranks}
    if len(validations) > 1:
        raise RuntimeError(f"the peers' validation losses differ: {sorted(validations)}")
    start = torch.load(folder / "start-0.pt")
    by_step = [list(losses) for losses in zip(*(rank.losses for rank in ranks), strict=True)]
    return by_step, validations.pop(), of_megatron(start, comparison.sizes)


def _remember_start(file: str) -> None:
    """Before: write down the model that the training begins with; called in a peer's process."""
    from megatron.core.utils import unwrap_model
    from megatron.training import training

    original = training.train

    @functools.wraps(original)
    def remembering(forward: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        (chunk,) = unwrap_model(model)
        torch.save({name: value.detach().clone() for name, value in chunk.named_parameters()}, file)
        return original(forward, model, *args, **kwargs)

    training.train = remembering


def _stock_data(comparison: Comparison, cache: Path) -> tuple[Callable[[int], Tensor], Callable[[int], Tensor]]:
    """Return Megatron's own training and validation samples by number, each int64, (context + 1,)."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    kind = argparse.Namespace(tokenizer_type="NullTokenizer", vocab_size=VOCABULARY, pad_vocab_size=False)
    config = GPTDatasetConfig(
        random_seed=comparison.seed,
        sequence_length=comparison.sizes.context,
        blend=([str(comparison.corpus)], None),
        split=_SPLIT,
        path_to_cache=str(cache),
        tokenizer=build_tokenizer(kind),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    builder = BlendedMegatronDatasetBuilder(GPTDataset, list(comparison.counts), lambda: True, config)
    training, held_out, _ = builder.build()

    def reading(samples: Any) -> Callable[[int], Tensor]:
        def sample(number: int) -> Tensor:
            found = samples[number]
            return torch.cat((found["tokens"], found["labels"][-1:]))

        return sample

    return reading(training), reading(held_out)
