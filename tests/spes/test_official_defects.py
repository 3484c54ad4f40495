# SPDX-License-Identifier: Apache-2.0
"""Defects of SPES's official implementation that ours does not have, where no other test shows it.

7    an upload without content succeeds and is never counted, so that everybody waits forever
23   pickle from an open port, both ways

Shown elsewhere (tests of the sync service are in tests/sync_service):

1    merging that mixes the matrices of different experts             test_merging
2    a DiLoCo baseline that keeps the first peer's experts only       test_feature, test_config
3    a bad upload that drops its peer silently                        test_damage
4    a wrong number of peers or experts that blocks a round           test_admission, test_round
5    results of a former round after a rollback                       test_rollback, test_checkpoint
6    names that are filtered in vain, and nothing is uploaded         test_admission, test_feature
8    a resume that begins with random weights                         test_feature, tests/examples/test_spes_scripts
9    a cluster script that calls what does not exist                  tests/examples/test_spes_scripts
10   plain JSON lines that are read as nothing                        tests/data/test_readers
11   ids that wrap around in 16 bits                                  tests/data/test_encode
14   a factor that jumps, and restarts on resume                   test_load_balance, test_feature
15   gradients of frozen experts                                      test_feature, test_memory
17   the whole model as one object, on every rank                     test_on_disk, test_jobs
18   a server's memory that grows with the peers                      test_reduction, benchmarks/spes_round
19   a similarity matrix of all pairs of weights                      benchmarks/spes_round (merge_memory_fraction)
20   one server's network for all bytes                               test_sharding
21   fp32 both ways, no overlap                                       test_updates, test_delay, test_ahead
22   two last uploads that make a round twice                         test_round, test_rounds_of_peers
24   no retry, membership, quorum, late join, run id, checksum        test_kills, test_damage, test_admission
25   a peer's NaN that reaches everyone                               test_non_finite_values, test_guards, test_merging
28   one process as a peer, equal blocks of experts                   test_layouts, test_ownership

Not ours: the export to other formats and FLOP figures (12, 13) are Megatron's; grouped experts are refused where some
are frozen (16); no script has a secret in it (26).
"""

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import megatron_ext
from megatron_ext.errors import UserError
from megatron_ext.sync_service.protocol.report import Report
from tests.sync_service.service import Service

PICKLING = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}


def test_7_an_upload_without_content_is_refused_with_what_it_lacks(make_service: Callable[..., Service]):
    service = make_service(peers=1)
    service.start()
    values = {"w": torch.ones(4)}
    with service.client("p0", values) as client:
        client.start(values)
        closed, missing = client._membership.commit(1, Report())
        assert not closed and "0 of the 4 elements of tensor 'w' have arrived" in missing
        client._upload = lambda number, sent: False
        with pytest.raises(UserError, match=r"0 of the 4 elements .* though it was uploaded 3 times"):
            client.sync(values)


@pytest.mark.parametrize("package", ["spes", "sync_service"])
def test_23_nothing_is_pickled(package: str):
    files = sorted((Path(megatron_ext.__file__).parent / package).rglob("*.py"))
    assert files
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            origin = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert PICKLING.isdisjoint(name.split(".")[0] for name in (*names, *origin)), file
            is_call = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            assert not (is_call and (node.value.id, node.attr) in {("torch", "load"), ("torch", "save")}), file
