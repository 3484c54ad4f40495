# SPDX-License-Identifier: Apache-2.0
"""Megatron jobs as peers: toy GPTs in the real training loop, several jobs at once."""

import functools
import os
import signal
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np

from tests.support.presets import LAYOUTS, PRECISIONS, Value, toy_gpt
from tests.support.pretrain import Before, Probe, RankOutcome, run_failing_pretrain, run_pretrain
from tests.sync_service.service import Service

SINGLE = ("single", "fp32", 1)

ALONE: dict[str, Value] = {
    f"sync_service{name}": None
    for name in ("", "_run", "_peer", "_peers", "_interval", "_round_seconds", "_heartbeat_seconds")
}
"""Laid over a peer's options, they make it a job that is none."""

Kind = tuple[str, str, int]
"""(layout, precision, ranks) of a job; ranks beyond those of one replica are data parallel."""


def job_arguments(service: Service, name: str, kind: Kind, **overrides: Value) -> list[str]:
    """Return the command line of a peer: 8 steps of 4 samples, a round every 4."""
    layout, precision, _ = kind
    options = {
        "train_iters": 8,
        "global_batch_size": 4,
        "micro_batch_size": 1,
        "lr": 1e-2,
        "sync_service": service.address,
        "sync_service_run": next(iter(service.runs)),
        "sync_service_peer": name,
        "sync_service_peers": next(iter(service.runs.values()))["peers"],
        "sync_service_interval": 4,
        "sync_service_round_seconds": 60,
        # A killed one does not count as alive for long.
        "sync_service_heartbeat_seconds": 0.3,
    }
    return toy_gpt(LAYOUTS[layout].options, PRECISIONS[precision], options, **overrides)


def run_job(
    service: Service,
    name: str,
    kind: Kind,
    *,
    before: Before | Sequence[Before] = (),
    probe: Probe | None = None,
    **overrides: Value,
) -> list[RankOutcome]:
    """Run a peer to its end; the probe begins with what `values_held` says, which it is unless given."""
    return run_pretrain(
        job_arguments(service, name, kind, **overrides),
        kind[2],
        before=before,
        probe=values_held if probe is None else probe,
        timeout=120,
    )


def start_job(service: Service, name: str, kind: Kind, **options: object) -> Future[list[RankOutcome]]:
    """Start a peer, see `run_job`."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(run_job, service, name, kind, **options)
    pool.shutdown(wait=False)
    return future


def failing_job(
    service: Service, name: str, kind: Kind, *, before: Before | Sequence[Before] = (), **overrides: Value
) -> str:
    """Run a peer that fails, and return what its first rank wrote to standard error."""
    exits = run_failing_pretrain(job_arguments(service, name, kind, **overrides), kind[2], before=before, timeout=120)
    return exits[0].stderr


def has_joined(service: Service) -> bool:
    """Return whether a peer has joined: the first one publishes the start."""
    return (service.state / "runs/demo/journal.jsonl").exists() and service.events("joined") != []


def values_held(model, optimizer, args):
    """Probe: return this rank's values in global terms, (name, start, shape, bytes of fp32) per box.

    Values are the authoritative ones of what is trained, and the parameters themselves of what is frozen. Besides, the
    samples that were read, and how many elements this rank would upload.
    """
    import torch

    from megatron_ext.params import ParameterView, global_views
    from megatron_ext.params.fsdp_shards import is_sharded, local_part
    from megatron_ext.seams.optimizer import InnerValues
    from megatron_ext.sync_service.megatron.slices import Slices, catalog_of

    values = InnerValues(optimizer, ParameterView.from_model(model))
    found = []
    for value in values.values:
        stop = value.start + value.tensor.numel()
        parameter = local_part(value.entry.parameter).detach().flatten()
        if not is_sharded(value.entry.parameter):
            parameter = parameter[value.start : stop]
        assert torch.equal(parameter, value.tensor.flatten().to(parameter.dtype)), value.entry.tensor.name
        for start, view in global_views(value.entry.slice, value.tensor, value.start, stop):
            content = view.detach().cpu().contiguous().numpy().tobytes()
            found.append((value.entry.tensor.name, start, tuple(view.shape), content))
    for entry in (*values.view.entries, *values.view.buffers):
        if not entry.parameter.requires_grad:
            for start, view in global_views(entry.slice, entry.parameter.detach(), 0, entry.parameter.numel()):
                content = view.float().cpu().contiguous().numpy().tobytes()
                found.append((entry.tensor.name, start, tuple(view.shape), content))
    slices = Slices(values, catalog_of(values.view, args.sync_service_peers))
    primary = sum(part.box.numel for part in slices.parts if part.is_primary)
    return found, getattr(args, "samples_seen", None), primary


def model_of(ranks: list[RankOutcome]) -> dict[str, np.ndarray]:
    """Put a job's model together; what two ranks hold must be equal bit for bit."""
    boxes = [box for rank in ranks for box in rank.probe[0]]
    whole: dict[str, np.ndarray] = {}
    for name, start, shape, _ in boxes:
        size = np.add(start, shape)
        whole[name] = np.full(np.maximum(size, np.shape(whole.get(name, np.zeros(size)))), np.nan, np.float32)
    for name, start, shape, content in boxes:
        at = tuple(slice(first, first + count) for first, count in zip(start, shape, strict=True))
        values = np.frombuffer(content, np.float32).reshape(shape)
        known = whole[name][at]
        assert np.array_equal(known[~np.isnan(known)], values[~np.isnan(known)]), f"copies of {name} differ"
        whole[name][at] = values
    assert not any(np.isnan(values).any() for values in whole.values())
    return whole


def same_bits(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    """Return whether two models are equal."""
    return left.keys() == right.keys() and all(left[name].tobytes() == right[name].tobytes() for name in left)


def remember_samples() -> None:
    """Before: keep the indices of the training samples that are read."""
    from megatron.core.datasets.gpt_dataset import GPTDataset
    from megatron.core.datasets.utils import Split
    from megatron.training import get_args

    original = GPTDataset.__getitem__

    def getitem(self, index):
        args = get_args()
        if self.index_split is Split.train:
            args.samples_seen = [*getattr(args, "samples_seen", []), index]
        return original(self, index)

    GPTDataset.__getitem__ = getitem


def samples_of(ranks: list[RankOutcome]) -> list[int]:
    """Return what a job has read, with `remember_samples`."""
    return sorted({index for rank in ranks for index in rank.probe[1] or []})


def die_in_step(iteration: int) -> Before:
    """Return a before: the job is killed when this many iterations are done."""
    return partial(_die_in_step, iteration)


def _die_in_step(iteration: int) -> None:
    from megatron.training import training

    original = training.train_step

    @functools.wraps(original)
    def train_step(*args, **kwargs):
        if kwargs["iteration"] == iteration:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    training.train_step = train_step
