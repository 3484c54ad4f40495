# SPDX-License-Identifier: Apache-2.0
"""Certificates that do not fit are named on both sides, with what to do: real ones, over the wire."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext.errors import UserError
from megatron_ext.sync_service.channel.tls import client_credentials, server_credentials, validity_problem
from tests.support.waiting import PATIENCE
from tests.sync_service.authority import Authority
from tests.sync_service.service import Service, refusal
from tests.sync_service.toy_peer import digest, start_values

MakeService = Callable[..., Service]
START = start_values(1)


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


@pytest.fixture
def theirs(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "theirs")


def test_mutual_tls_lets_only_those_in_whom_the_authority_has_signed(
    make_service: MakeService, ours: Authority, theirs: Authority
):
    service = make_service(peers=1)
    service.extra = {**ours.issue("127.0.0.1"), "tls_client_ca": ours.file}
    service.start()
    for wrong, named in (
        (theirs.issue("127.0.0.1"), "that its tls_client_ca has signed tls_cert"),
        ({}, "that it asks for no certificate (else give tls_cert and tls_key)"),
    ):
        said = refusal(service.address, 0.5, tls_ca=ours.file, **wrong)
        assert "has not answered Status" in said and named in said
    with service.client("p0", START, connection={"tls_ca": ours.file, **ours.issue("p0")}) as client:
        assert digest(client.start(START)) == digest(START)


@pytest.mark.parametrize(
    ("name", "days", "authority", "problem"),
    [
        ("127.0.0.1", 30, "theirs", "the authority in tls_ca has not signed the server's certificate; give the one"),
        ("other.example", 30, "ours", "the server's certificate is for another name than the one in this address"),
        ("127.0.0.1", -2, "ours", "the server's certificate has expired; give the server a new one"),
    ],
)
def test_a_certificate_that_does_not_fit_is_said_at_once(
    make_service: MakeService, ours: Authority, theirs: Authority, name: str, days: int, authority: str, problem: str
):
    service = make_service(peers=1)
    service.extra = ours.issue(name, days=days)
    service.start()
    begin = time.monotonic()
    said = refusal(service.address, tls_ca={"ours": ours, "theirs": theirs}[authority].file)
    assert said.startswith(f"server {service.address}: {problem}")
    assert time.monotonic() - begin < PATIENCE / 2


def test_tls_on_one_side_alone_is_named(make_service: MakeService, ours: Authority):
    plain, sealed = make_service(peers=1), make_service(peers=1)
    plain.start()
    assert "the server has no TLS; drop tls_ca" in refusal(plain.address, tls_ca=ours.file)
    sealed.extra = ours.issue("127.0.0.1")
    sealed.start()
    assert "see that it runs there, that it has no TLS (else give tls_ca)" in refusal(sealed.address, 0.5)


def test_peers_wait_for_a_server_that_comes_back_with_a_wrong_certificate(
    make_service: MakeService, ours: Authority, theirs: Authority
):
    service = make_service(peers=1)
    service.extra = ours.issue("127.0.0.1")
    server = service.start()
    connection = {"tls_ca": ours.file, "patience_seconds": 1.0}
    with service.client("p0", START, connection=connection) as client:
        client.start(START)
        server.kill()
        server.wait()
        service.extra = theirs.issue("127.0.0.1")
        service.start()
        with pytest.raises(UserError, match=r"has not answered .* for 1 s .*the authority in tls_ca has not signed"):
            client.sync(START)


def test_a_certificate_that_is_not_valid_now_is_said_on_its_own_side(make_service: MakeService, ours: Authority):
    for days, problem in ((30, None), (-2, "certificate has expired")):
        files = ours.issue("localhost", days=days)
        assert validity_problem(**{name.removeprefix("tls_"): file for name, file in files.items()}) == problem
    with pytest.raises(UserError, match=r"tls_cert .*: certificate has expired, so that no server lets this peer in"):
        client_credentials(ours.file, files["tls_cert"], files["tls_key"])
    service = make_service(peers=1)
    service.extra = files
    service.start()
    said = f"tls_cert {files['tls_cert']}: certificate has expired; no peer will trust this server"
    assert said in service.output


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path, ours: Authority):
    pair, other = ours.issue("localhost"), ours.issue("elsewhere")
    with pytest.raises(UserError, match=rf"tls_key {other['tls_key']}: is not the key of tls_cert {pair['tls_cert']}"):
        server_credentials(pair["tls_cert"], other["tls_key"], None)
    with pytest.raises(UserError, match=r"is not the key of tls_cert .*KEY_VALUES_MISMATCH"):
        client_credentials(ours.file, pair["tls_cert"], other["tls_key"])
    odd = tmp_path / "odd.pem"
    odd.write_text("-----BEGIN CERTIFICATE-----\nnothing\n-----END CERTIFICATE-----\n")
    with pytest.raises(UserError, match=r"tls_ca .*: has no certificate that can be read"):
        client_credentials(str(odd), None, None)
    with pytest.raises(UserError, match=r"tls_client_ca .*: has no certificate that can be read"):
        server_credentials(pair["tls_cert"], pair["tls_key"], pair["tls_key"])
