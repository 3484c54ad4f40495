# SPDX-License-Identifier: Apache-2.0
"""What jobs with local SGD, SPES peers and a server saved becomes a Hugging Face model: the right one of several."""

import importlib
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_ext.convert.families import family_named
from megatron_ext.convert.from_hf import from_hf
from megatron_ext.convert.hf_names import hf_tensors
from megatron_ext.convert.megatron_args import read_args
from megatron_ext.convert.model_sources import open_checkpoint
from megatron_ext.convert.to_hf import ToHf, to_hf
from megatron_ext.errors import UserError
from megatron_ext.sync_service.disk.snapshot import Snapshot
from megatron_ext.sync_service.disk.snapshot_names import snapshot_name
from tests.convert import models
from tests.local_sgd.runs import arguments
from tests.support.pretrain import run_pretrain
from tests.support.pretrain_rank import digest
from tests.support.waiting import until
from tests.sync_service.cluster import Cluster
from tests.sync_service.jobs import SINGLE, has_joined, job_arguments
from tests.sync_service.service import Service


def exported(source: Path, target: Path, **options: object) -> dict[str, torch.Tensor]:
    """Return the weights that a conversion writes."""
    to_hf(ToHf(source=source, target=target, overwrite=True, **options))
    return load_file(target / "model.safetensors")


def test_local_sgd_has_an_anchor_and_a_model_of_every_worker(tmp_path: Path):
    start = from_hf(models.save("llama", tmp_path / "model"), tmp_path / "start")
    options = {"local_sgd_sync_interval": 4, "train_iters": 6, "save_interval": 4, "seq_length": 20}
    words = arguments(
        "single", "fp32", workers=2, load=str(start.folder), save=str(tmp_path / "run"), vocab_size=249, **options
    )
    ranks = run_pretrain([*words, *start.flags], 2)
    last, middle = tmp_path / "run", tmp_path / "run" / "iter_0000004"
    workers = [exported(last, tmp_path / "hf", weights=f"worker:{number}") for number in (0, 1)]
    for rank, worker in zip(ranks, workers, strict=True):
        assert digest(worker["lm_head.weight"]) == rank.parameters[0]["module.output_layer.weight"]
    anchor = exported(last, tmp_path / "hf", weights="anchor")
    at_round = exported(middle, tmp_path / "hf")
    assert all(torch.equal(anchor[name], at_round[name]) for name in anchor)
    assert not any(torch.equal(anchor["lm_head.weight"], worker["lm_head.weight"]) for worker in workers)
    assert not torch.equal(*(worker["lm_head.weight"] for worker in workers))
    with pytest.raises(UserError, match="no weights model; it has anchor, worker:0, worker:1"):
        exported(last, tmp_path / "hf")
    with pytest.raises(UserError, match="no weights worker:2"):
        exported(last, tmp_path / "hf", weights="worker:2")
    with pytest.raises(UserError, match=r"those in .*: iter_0000004, iter_0000006"):
        exported(last, tmp_path / "hf", iteration=5)


def test_the_server_has_the_model_that_spes_peers_have(make_service: Callable[..., Service], tmp_path: Path):
    source = models.save("qwen3_moe", tmp_path / "model")
    start = from_hf(source, tmp_path / "start")
    service = make_service({"demo": {"peers": 2, "outer_optimizer": "sgd", "sync_steps": 4}})
    service.start()
    running = []
    for place, name in enumerate("ab"):
        words = job_arguments(
            service,
            name,
            SINGLE,
            sync_service_index=place,
            using_spes=True,
            spes_num_train_experts_per_node=2,
            load=str(start.folder),
            save=str(tmp_path / name),
            save_interval=8,
            seq_length=20,
            vocab_size=249,
            moe_token_dispatcher_type="alltoall",
        )
        running.append(in_background([*words, *start.flags]))
        if not place:
            until(lambda: has_joined(service), "the first peer, which publishes the start")
    for job in running:
        job.result()
    service.stop()
    peers = [exported(tmp_path / name, tmp_path / "hf") for name in "ab"]
    server = exported(service.state, tmp_path / "hf", config=start.folder)
    begun = load_file(source / "model.safetensors")
    for name, values in server.items():
        assert torch.equal(values, peers[0][name]) and torch.equal(values, peers[1][name]), name
        assert not torch.equal(values, begun[name]), name
    run = service.state / "runs" / "demo"
    newest = max((run / "snapshots").glob("round-*.safetensors"))
    assert exported(newest, tmp_path / "hf", config=source).keys() == server.keys()
    with pytest.raises(UserError, match="--hf-config"):
        exported(service.state, tmp_path / "hf")
    other = models.save("qwen3_moe, dense layer", tmp_path / "other")
    with pytest.raises(UserError, match="--moe-router-pre-softmax is False in the run"):
        exported(run, tmp_path / "hf", config=other)
    whole = newest.read_bytes()
    head = 8 + int.from_bytes(whole[:8], "little")
    for place, what in ((head + 100, "outer:record"), (len(whole) // 3, "decoder")):
        newest.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(UserError, match=f"'{what}.*damaged on the disk"):
            exported(newest, tmp_path / "hf", config=source)
    shutil.rmtree(run / "snapshots")
    with pytest.raises(UserError, match="neither a checkpoint, a snapshot nor the folder of a sync service"):
        exported(service.state, tmp_path / "hf", config=source)


def test_several_servers_have_one_model(make_service: Callable[..., Service], tmp_path: Path):
    source = models.save("qwen3_moe", tmp_path / "model")
    start = from_hf(source, tmp_path / "start")
    family = family_named("qwen3_moe")
    tensors = hf_tensors(start.settings.shape(), family.names)
    reader = open_checkpoint(start.folder / "release")
    values = {ours.name: reader.read(ours.name) for tensor in tensors for ours, _ in tensor.sources}
    cluster = Cluster(make_service({"demo": {"peers": 1, "sync_steps": 1}}), 2)
    cluster.start_all()
    with cluster.service.client("a", values, index=0) as client:
        moved = {name: value + 1 for name, value in client.start(values).items()}
        client.upload(1, moved)
        values = client.fetch(1, moved).values
    cluster.service.stop()
    state = cluster.service.state
    parts = [folder / "runs" / "demo" / "snapshots" / snapshot_name(1) for folder in (state, state / "shard-1")]
    held = [set(Snapshot(part).tensors) for part in parts]
    assert all(held) and not held[0] & held[1]
    server = exported(state, tmp_path / "hf", config=source)
    begun = load_file(source / "model.safetensors")
    assert server.keys() == begun.keys()
    for tensor in tensors:
        rows = torch.cat([values[ours.name][slice(*part.at)] for ours, part in tensor.sources])
        assert torch.equal(server[tensor.name], rows), tensor.name
        assert (server[tensor.name] - begun[tensor.name]).mean() > 0.9, tensor.name
    with pytest.raises(UserError, match=r"--vocab-size 200: 250 rows .* are tokens, of which this would cut off 50"):
        exported(state, tmp_path / "hf", config=source, vocab_size=200)
    parts[1].unlink()
    with pytest.raises(UserError, match=r"shard-1.*round-.*: the snapshot of a shard is missing"):
        exported(state, tmp_path / "hf", config=source)


def in_background(words: list[str]) -> Future[object]:
    """Start a job of one rank."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(run_pretrain, words, 1, timeout=120)
    pool.shutdown(wait=False)
    return future


def test_a_round_of_something_else_than_a_model_is_refused(make_service: Callable[..., Service], tmp_path: Path):
    service = make_service({"demo": {"peers": 1}})
    service.start()
    with service.client("a", values := {"w": torch.zeros(4)}, index=0) as client:
        client.start(values)
    service.stop()
    with pytest.raises(UserError, match=r"has no embedding\.word_embeddings\.weight, so that it is not a model"):
        exported(service.state, tmp_path / "hf", config=models.save("llama", tmp_path / "model"))


@pytest.mark.parametrize("said", [b"abc", b"", b"\xff", b"-4"])
def test_a_tracker_that_names_no_iteration_is_refused_with_those_that_are_there(said: bytes, tmp_path: Path):
    made = from_hf(models.save("llama", tmp_path / "model"), tmp_path / "start")
    (made.folder / "latest_checkpointed_iteration.txt").write_bytes(said)
    with pytest.raises(UserError, match=r"not the number of an iteration; write that of a whole checkpoint.*release"):
        exported(made.folder, tmp_path / "hf")


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        ("a file of values is missing", r"__0_0\.distcp: the checkpoint.s file is missing"),
        ("a file of values is cut off", "bytes instead of"),
        ("its description is damaged", r"\.metadata cannot be read"),
        ("a tensor is not of the model", "which the model does not have"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_nothing_is_written(
    harm: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made = from_hf(models.save("qwen2", tmp_path / "model"), tmp_path / "start")
    folder = made.folder / "release"
    if harm.startswith("a file"):
        file = folder / "__0_0.distcp"
        content = file.read_bytes()
        file.unlink()
        if harm.endswith("cut off"):
            file.write_bytes(content[:-1])
    elif harm.startswith("its"):
        (folder / ".metadata").write_bytes(b"\x80")
    else:
        # The biases of queries, keys and values are not Llama's.
        common = read_args(folder)
        common.add_qkv_bias = False
        module = importlib.import_module("megatron_ext.convert.to_hf")
        monkeypatch.setattr(module, "read_args", lambda folder: common)
    with pytest.raises(UserError, match=said):
        exported(made.folder, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
