# SPDX-License-Identifier: Apache-2.0
"""Options of a peer that cannot be meant are refused by name."""

import pytest

from megatron_ext.sync_service.megatron.arguments import SyncServiceConfig, file_problems
from tests.support.presets import toy_gpt
from tests.support.pretrain import run_failing_pretrain

GOOD = {
    "sync_service": "127.0.0.1:50051",
    "sync_service_run": "demo",
    "sync_service_peer": "a",
    "sync_service_peers": 2,
    "sync_service_interval": 4,
}
BY_TIME = {"sync_service_interval": None, "sync_service_interval_seconds": 9.0}


def test_good_options_have_no_problem():
    assert SyncServiceConfig(**GOOD).problems() == []
    assert SyncServiceConfig().problems() == []
    assert SyncServiceConfig(**GOOD, sync_service_delay=3).problems() == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"sync_service": None}, "--sync-service-run has no effect without --sync-service"),
        ({"sync_service": "50051"}, "--sync-service is '50051'; give HOST:PORT, with a port of 1 to 65535"),
        ({"sync_service": "10.0.0.1:50051"}, "--sync-service 10.0.0.1:50051 is on another machine"),
        ({"sync_service_run": None}, "--sync-service needs --sync-service-run; add it"),
        ({"sync_service_interval": None}, "--sync-service needs --sync-service-interval or --sync-service-"),
        ({"sync_service_interval_seconds": 9.0}, "--sync-service-interval counts steps and --sync-service-interval-"),
        ({"sync_service_interval_seconds": -1.0}, "--sync-service-interval-seconds is -1.0; it must be above 0"),
        ({"sync_service_interval_seconds": float("nan")}, "--sync-service-interval-seconds is nan; it must be above 0"),
        ({"sync_service_interval": 0}, "--sync-service-interval is 0; it must be 1 to 1000000000"),
        ({"sync_service_delay": -1}, "--sync-service-delay is -1; it must be 0 or more"),
        ({"sync_service_delay": 4}, "--sync-service-delay is 4 and --sync-service-interval 4; the delay must be below"),
        ({"sync_service_delay": 1, **BY_TIME}, "--sync-service-delay with --sync-service-interval-seconds: a round"),
        ({"sync_service": None, "sync_service_delay": 1}, "--sync-service-delay has no effect without --sync-service"),
        ({"sync_service_interval": 10**20}, f"--sync-service-interval is {10**20}; it must be 1 to 1000000000"),
        ({"sync_service_peers": 0}, "--sync-service-peers is 0; it must be 1 to 4096"),
        ({"sync_service_peers": 5000}, "--sync-service-peers is 5000; it must be 1 to 4096"),
        ({"sync_service_streams": 2000}, "--sync-service-streams is 2000; it must be 1 to 1024"),
        ({"sync_service_peer": "a/b"}, "--sync-service-peer is 'a/b'; use up to 64 letters"),
        ({"sync_service_index": 2}, "--sync-service-index is 2; it must be 0 to --sync-service-peers minus 1"),
        ({"sync_service_round_seconds": 0.0}, "--sync-service-round-seconds is 0.0; it must be above 0"),
    ],
)
def test_a_bad_option_is_named(change, sentence):
    assert any(problem.startswith(sentence) for problem in SyncServiceConfig(**{**GOOD, **change}).problems())


def test_files_that_cannot_be_used_are_named_before_anything_is_built(tmp_path):
    (tmp_path / "short").write_text("short")
    (tmp_path / "odd").write_text("no certificate")
    (tmp_path / "tls_ca.pem").write_text("no certificate, in a file that is called as a field is")
    for change, sentence in (
        ({"token_file": tmp_path / "none"}, f"token-file {tmp_path}/none: cannot be read: No such file or directory"),
        ({"token_file": tmp_path / "short"}, f"token-file {tmp_path}/short: must hold at least 16 printable ASCII"),
        ({"tls_ca": tmp_path / "odd"}, f"tls-ca {tmp_path}/odd: is not a PEM file"),
        ({"tls_ca": tmp_path / "tls_ca.pem"}, f"tls-ca {tmp_path}/tls_ca.pem: is not a PEM file"),
        ({"token_file": tmp_path / "token_file"}, f"token-file {tmp_path}/token_file: cannot be read: No such file"),
        ({"tls_cert": tmp_path / "odd"}, "tls-cert and --sync-service-tls-key belong together, and need --sync-"),
    ):
        config = SyncServiceConfig(**GOOD, **{f"sync_service_{name}": str(file) for name, file in change.items()})
        (problem,) = file_problems(config)
        assert problem.startswith(f"--sync-service-{sentence}")
    assert file_problems(SyncServiceConfig(**GOOD)) == []


def test_a_bad_file_ends_a_job_at_its_arguments(tmp_path):
    options = {**GOOD, "sync_service_tls_ca": str(tmp_path / "none")}
    said = run_failing_pretrain(toy_gpt(GOOD, options), 1)[0].stderr
    assert f"--sync-service-tls-ca {tmp_path}/none: cannot be read: No such file or directory" in said


def test_a_run_names_all_that_cannot_be_combined():
    options = {
        "use_local_sgd": True,
        "local_sgd_workers": 2,
        "local_sgd_sync_interval": 3,
        "local_sgd_warmup_steps": 2,
        "local_sgd_fragments": 2,
        "sync_service_interval": 4,
        "sync_service_delay": 2,
        "freeze_all_layers": True,
    }
    said = run_failing_pretrain(toy_gpt(GOOD, options), 1)[0].stderr
    assert "--sync-service-interval is 4, which is not a multiple of --local-sgd-sync-interval 3" in said
    assert "--local-sgd-warmup-steps is 2, which is not a multiple of --local-sgd-sync-interval 3" in said
    assert "streaming (the --local-sgd-fragment options) leaves workers with different weights" in said
    assert "--sync-service-delay with --use-local-sgd: a round would be applied where the workers" in said
    assert "--freeze-all-layers is not supported with the sync service: there would be nothing to train" in said
