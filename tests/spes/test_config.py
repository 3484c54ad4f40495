# SPDX-License-Identifier: Apache-2.0
"""The configuration of a SPES peer: the README's keys, and errors that name key and fix."""

import json
import re
from pathlib import Path

import pytest

from megatron_ext.errors import UserError
from megatron_ext.spes import Ownership, SpesConfig, read_spes_config
from megatron_ext.sync_service.server.config import read_config

README = """\
using_spes: true
spes_config:
  num_peers: 4                  # Total training nodes
  peer_id: 0                    # Current node ID (0-indexed)
  num_train_experts_per_node: 2 # Local experts per node
  sync_steps: 100               # Sync frequency
  server_addr: 127.0.0.1:50051  # Parameter Server Address
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "spes.yaml"


def test_the_readmes_keys_are_read(file: Path):
    file.write_text(README)
    found = read_spes_config(file)
    assert found == SpesConfig(
        using_spes=True,
        num_peers=4,
        peer_id=0,
        num_train_experts_per_node=2,
        sync_steps=100,
        server_addr="127.0.0.1:50051",
    )
    assert found.ownership(4, 8) == Ownership.contiguous(4, 8)


@pytest.mark.parametrize(("kind", "experts"), [("", 8), ("toy_", 16)])
def test_the_shipped_files_belong_together(kind: str, experts: int):
    configs = Path(__file__).resolve().parents[2] / "configs"
    run = read_config(configs / f"spes_{kind}server.yaml")["runs"]["spes"]
    peer = read_spes_config(configs / f"spes_{kind}peer.yaml")
    assert run.problems() == [] and (run.peers, run.sync_steps) == (peer.num_peers, peer.sync_steps)
    assert peer.ownership(run.peers, experts) == Ownership.contiguous(4, experts)


def test_what_the_shipped_file_shows_as_a_comment_works_too():
    configs = Path(__file__).resolve().parents[2] / "configs"
    text = (configs / "spes_peer.yaml").read_text()
    for key in ("experts_per_peer", "expert_owners"):
        (line,) = re.findall(rf"# {key}: (\[.*\])", text)
        given = {key: tuple(tuple(e) if isinstance(e, list) else (e,) for e in json.loads(line))}
        given = given if key == "expert_owners" else {key: tuple(json.loads(line))}
        assert len(SpesConfig(using_spes=True, **given).ownership(4, 8).owners) == 8


@pytest.mark.parametrize(
    ("extra", "peers", "experts", "wanted"),
    [
        ("num_train_experts_per_node: 2, expert_assignment: interleaved", 4, 8, Ownership.interleaved(4, 8)),
        ("experts_per_peer: [1, 3]", 2, 4, Ownership.contiguous(2, 4, [1, 3])),
        ("expert_owners: [0, [0, 1], 1]", 2, 3, Ownership.of_map(2, 3, [[0], [0, 1], [1]])),
        ("expert_owners: {2: 1, 0: 0, 1: [1, 0]}", 2, 3, Ownership.of_map(2, 3, [[0], [0, 1], [1]])),
        ("num_train_experts_per_node: 8", 4, 8, Ownership.everyone(4, 8)),
    ],
)
def test_every_way_of_sharing_out_experts_can_be_said(
    file: Path, extra: str, peers: int, experts: int, wanted: Ownership
):
    file.write_text(f"using_spes: true\nspes_config: {{{extra}}}\n")
    assert read_spes_config(file).ownership(peers, experts) == wanted


def test_with_using_dilico_everybody_trains_all(file: Path):
    file.write_text(
        "using_spes: true\nusing_dilico: true\nspes_config: {num_peers: 3, num_train_experts_per_node: 7}\n"
    )
    assert read_spes_config(file).ownership(3, 7) == Ownership.everyone(3, 7)
    with pytest.raises(
        UserError, match=r"num_train_experts_per_node is 7; with using_dilico all 8 experts are trained"
    ):
        read_spes_config(file).ownership(3, 8)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("using_spec: true", "key 'using_spec' is unknown; the keys are using_spes, using_dilico, spes_config"),
        ("using_spes: true\nspes_config: {peers: 4}", "spes_config: key 'peers' is unknown; the keys are server_addr"),
        ("using_spes: 1", "using_spes is 1; it must be true or false"),
        ("using_spes: true\nspes_config: {num_peers: two}", "num_peers is 'two'; it must be a whole number"),
        ("using_spes: true\nspes_config: {num_peers: true}", "num_peers is True; it must be a whole number"),
        ("using_spes: true\nspes_config: {server_addr: 5}", "server_addr is 5; it must be a word"),
        ("using_spes: true\nspes_config: {experts_per_peer: 5}", "experts_per_peer is 5; it must be a list of whole"),
        ("using_spes: true\nspes_config: {expert_owners: [x]}", "expert_owners .* must be a list with the owners"),
        ("using_spes: true\nspes_config: {expert_owners: {1: 0}}", "a mapping must name the experts 0 to 0"),
        ("using_spes: true\nspes_config: {expert_assignment: random}", "it must be contiguous or interleaved"),
        ("using_spes: true", "nothing says who owns which experts; give one of num_train_experts_per_node"),
        (
            "using_spes: true\nspes_config: {num_train_experts_per_node: 2, experts_per_peer: [2, 2]}",
            "num_train_experts_per_node and experts_per_peer are given; give one of",
        ),
        (
            "using_spes: true\nspes_config: {num_train_experts_per_node: 2, quant_non_local_trainable_experts: true}",
            "quant_non_local_trainable_experts has no effect, not in the paper's code either; drop it",
        ),
        (
            "using_spes: true\nspes_config: {num_train_experts_per_node: 2, num_peers: 4, peer_id: 4}",
            "peer_id is 4; with num_peers 4 it must be below that",
        ),
        ("using_spes: true\nspes_config: {num_train_experts_per_node: 2, sync_steps: 0}", "sync_steps is 0"),
        ("spes_config: {num_train_experts_per_node: 2}", "num_train_experts_per_node has no effect without using_spes"),
        (
            "using_spes: true\nspes_config: {num_train_experts_per_node: 2, decayed_factor_update_steps: 100}",
            "decayed_factor_update_steps has no effect without using_decayed_aux_loss; add it or drop",
        ),
        *(
            (
                f"using_spes: true\nspes_config: {{num_train_experts_per_node: 2, server_addr: '{address}'}}",
                f"server_addr is '{address}'; give HOST:PORT",
            )
            for address in ("", "localhost", "127.0.0.1:99999", "http://x:1")
        ),
        ("- 1", "must be a mapping"),
        ("spes_config: 1", "spes_config must be a mapping"),
        ("{", "not valid YAML"),
    ],
)
def test_a_bad_file_is_refused_with_the_key(file: Path, text: str, problem: str):
    file.write_text(text)
    with pytest.raises(UserError, match=problem) as caught:
        read_spes_config(file)
    assert str(caught.value).startswith(str(file))


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(UserError, match=r"none\.yaml: cannot be read: No such file"):
        read_spes_config(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("config", "peers", "experts", "problem"),
    [
        ({"num_train_experts_per_node": 2}, 4, 16, r"makes 8 experts, and the model has 16 per layer; give 4 \(or 16"),
        ({"num_train_experts_per_node": 2}, 3, 16, "give experts_per_peer, 3 numbers that add up to 16"),
        ({"num_train_experts_per_node": 2, "num_peers": 8}, 4, 8, "num_peers is 8, and there are 4 peers"),
    ],
)
def test_a_configuration_that_does_not_fit_the_model_is_refused(config, peers: int, experts: int, problem: str):
    with pytest.raises(UserError, match=problem):
        SpesConfig(using_spes=True, **config).ownership(peers, experts)


def test_peers_are_written_as_words_on_a_command_line():
    parse = SpesConfig.__dataclass_fields__["expert_owners"].metadata["argparse_meta"]["type"]
    assert [parse(word) for word in ("0", "0,2")] == [(0,), (0, 2)]
