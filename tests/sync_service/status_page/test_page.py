# SPDX-License-Identifier: Apache-2.0
"""The status page: what it says, to whom, and that nothing but it runs in a browser."""

import http.client
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest

from megatron_ext.cli.main import main
from megatron_ext.errors import UserError
from megatron_ext.sync_service.rounds.history import History
from megatron_ext.sync_service.status_page import http as status_http
from megatron_ext.sync_service.status_page.http import StatusPage
from megatron_ext.sync_service.status_page.metrics import metrics_text
from megatron_ext.sync_service.status_page.page import page
from tests.support.browser import needs_chromium, rendered
from tests.support.waiting import until
from tests.sync_service.service import Service
from tests.sync_service.toy_peer import start_values

MakeService = Callable[..., Service]

HOSTILE = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"


def hostile_run(**more: Any) -> dict[str, Any]:
    """Return a run in which every text that somebody else has given wants to be a script."""
    history = History()
    history.apply({"event": "joined", "peer": HOSTILE, "index": 0, "time": 90.0})
    history.apply({"event": "uploaded", "round": 1, "peer": HOSTILE, "bytes": 40, "loss": 2.0, "time": 95.0})
    rejected = {HOSTILE + "2": f"tensor {HOSTILE!r}"}
    made = {"contributors": [HOSTILE], "rejected": rejected, "norms": {HOSTILE: 1.0}, "bytes": 80, "seconds": 0.5}
    history.apply({"event": "committed", "round": 1, "time": 100.0, **made})
    history.apply({"event": "evicted", "peer": HOSTILE, "reason": HOSTILE, "time": 101.0})
    peer = {"peer": HOSTILE, "index": 0, "uploaded": False, "bytes_uploaded": 0, "awaited": True, "missed": 0}
    return {
        "run": f"demo {HOSTILE}",
        "open_round": 2,
        "waiting_for": f"round 2 awaits {HOSTILE}",
        "problem": "",
        "asynchronous": False,
        "quorum": 1,
        "places": 1,
        "model_bytes": 1000,
        "newest_round": 1,
        "rejected": rejected,
        "peers": [{**peer, "last_seen": 99.0}],
        "time": 103.0,
        "rounds": list(history.rounds),
        "incidents": list(history.incidents),
        "indices": {**history.indices, HOSTILE + "2": 1},
        "counts": history.counts,
        "health": {"level": "attention", "word": "Needs attention", "reasons": [HOSTILE]},
        **more,
    }


@contextmanager
def served(runs: Callable[[], list[dict[str, Any]]]) -> Iterator[str]:
    """Serve a page from this process."""
    found = StatusPage("127.0.0.1", 0, runs)
    yield found.address
    found.close()


def port_of(address: str) -> int:
    """Return the port of a page's address."""
    return int(address.rstrip("/").rpartition(":")[2])


def read(address: str) -> str:
    with urlopen(address, timeout=20) as reply:
        content: str = reply.read().decode()
    return content


@pytest.fixture
def service(make_service: MakeService) -> Service:
    """Three peers that make rounds; of the third one is rejected, a fourth is evicted."""
    service = make_service({"demo": {"peers": 4, "quorum": 3, "grace_seconds": 0.1}})
    service.extra = {"status_port": 0}
    service.start()
    non_finite = {"2": {"layer.0.weight": "nan"}}
    peers = [
        service.peer(f"p{index}", 3, options={"index": index}, values=non_finite if index == 2 else {})
        for index in range(3)
    ]
    assert [peer.wait() for peer in peers] == [0, 0, 0], [peer.output for peer in peers]
    with service.client("p3", start_values(1)) as client:
        client.start(start_values(1))
    assert main(["server", "evict", "p3", "--reason", f"too hot {HOSTILE}", "--server", service.address]) == 0
    return service


def page_of(service: Service) -> str:
    """Return the address of the page of the server that runs now."""
    found = re.search(r"status page at (\S+)", service.output)
    assert found is not None, service.output
    return found[1]


def test_the_page_of_a_real_run_says_what_there_was_also_after_a_restart(service: Service):
    def facts() -> dict[str, Any]:
        (run,) = json.loads(read(page_of(service) + "status.json"))["runs"]
        return run

    run = facts()
    assert [entry["round"] for entry in run["rounds"]] == [0, 1, 2, 3]
    assert run["rounds"][3]["losses"] == {"p0": 1.0, "p1": 1.1, "p2": 1.2}
    assert run["rounds"][3]["steps"] == {"p0": 10, "p1": 10, "p2": 10}
    assert [(entry["kind"], entry["peer"]) for entry in run["incidents"]] == [("rejected", "p2"), ("evicted", "p3")]
    html = read(page_of(service))
    for text in (
        "Needs attention",
        "3 of 4 peers are here",
        "non-finite",
        "too hot &lt;script&gt;",
        "round 3, p1: 1.1",
    ):
        assert text in html, text
    assert HOSTILE not in html
    metrics = read(page_of(service) + "metrics")
    for line in (
        'megatron_ext_sync_rounds_committed_total{run="demo"} 4.0',
        'megatron_ext_sync_contributions_rejected_total{run="demo"} 1.0',
        'megatron_ext_sync_peer_loss{peer="p2",run="demo"} 1.2',
        'megatron_ext_sync_health{run="demo"} 2.0',
    ):
        assert line in metrics.splitlines()

    service.server.kill()
    service.server.wait()
    service.start()
    again = facts()
    lasting = ("rounds", "incidents", "indices", "counts", "open_round")
    assert {key: again[key] for key in lasting} == {key: run[key] for key in lasting}


def test_what_others_say_is_text():
    html = page([hostile_run()])
    assert "<script>document" not in html and "<img" not in html and 'onerror="' not in html
    assert html.count("<script>") == 1
    metrics = metrics_text([hostile_run(run='a"b\\c\nd')])
    assert 'megatron_ext_sync_open_round{run="a\\"b\\\\c\\nd"} 2.0' in metrics.splitlines()
    sample = re.compile(r'[a-z_]+\{[a-z]+="(?:[^"\\]|\\.)*"(?:,[a-z]+="(?:[^"\\]|\\.)*")*\} \S+')
    assert all(line.startswith("# ") or sample.fullmatch(line) for line in metrics.splitlines())


def test_the_page_only_answers_questions_from_this_machine():
    with served(lambda: [hostile_run()]) as address:
        with urlopen(Request(address, method="HEAD"), timeout=20) as reply:
            assert reply.read() == b"" and "default-src 'none'" in reply.headers["Content-Security-Policy"]
        for request, code in (
            (Request(address + "etc"), 404),
            (Request(address, data=b"x"), 501),
            (Request(address, method="DELETE"), 501),
            # A name that an attacker's page has been given this machine's address for.
            (Request(address, headers={"Host": "evil.example:80"}), 421),
        ):
            with pytest.raises(HTTPError) as caught:
                urlopen(request, timeout=20)
            assert caught.value.code == code
        connection = http.client.HTTPConnection(address.split("/")[2], timeout=20)
        connection.request("GET", "/", headers={"Host": "localhost:8080"})
        assert connection.getresponse().status == 200
        connection.close()


def test_callers_that_take_their_time_are_few_and_are_left(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(status_http, "_SECONDS", 2.0)
    with served(lambda: []) as address:
        place = ("127.0.0.1", port_of(address))
        before = threading.active_count()
        with ExitStack() as stack:
            slow = [stack.enter_context(socket.create_connection(place)) for _ in range(100)]
            # Whoever comes when all threads are taken is told so at once.
            until(lambda: is_left(slow[-1]), "the end of a connection")
            assert threading.active_count() - before <= 2 * status_http._MOST_CALLERS
            begin = time.monotonic()
            while not is_left(slow[0]):
                with suppress(ConnectionError):  # it is left meanwhile
                    slow[0].sendall(b"x")
                time.sleep(0.1)
                assert time.monotonic() - begin < 30
        assert "<main" in read(address)


def is_left(connection: socket.socket) -> bool:
    """Return whether the other side has hung up."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    finally:
        connection.setblocking(True)


def test_callers_that_vanish_leave_no_trace_in_the_log(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
):
    with served(lambda: []) as address:
        place = ("127.0.0.1", port_of(address))
        for sent in (b"", b"GET / HTTP/1.0\r\n\r\n"):
            caller = socket.create_connection(place)
            caller.sendall(sent)
            # Closed so, a connection is reset.
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            caller.close()
        read(address)
        assert "Traceback" not in capfd.readouterr().err and not caplog.records
    with served(lambda: 1 // 0) as address, pytest.raises((URLError, http.client.HTTPException)):
        read(address)
    until(lambda: "ZeroDivisionError" in caplog.text, "what is wrong here is in the log")


def test_losses_are_those_of_the_newest_round():
    history = History()
    for index, name in enumerate("abc"):
        history.apply({"event": "joined", "peer": name, "index": index, "time": 90.0})
    for number, losses in enumerate(({"a": 2.0, "b": 4.0, "c": 6.0}, {"a": 1.0, "b": None})):
        for name, loss in losses.items():
            said = {"round": number, "peer": name, "bytes": 40, "loss": loss, "time": 95.0 + number}
            history.apply({"event": "uploaded", **said})
        made = {"contributors": list(losses), "rejected": {}, "norms": dict.fromkeys(losses, 1.5), "bytes": 80}
        history.apply({"event": "committed", "round": number, "time": 100.0 + number, "seconds": 0.5, **made})
        if number == 0:
            # The norms of the start are those of the values.
            assert "peer_norm{" not in metrics_text([hostile_run(rounds=list(history.rounds))])
    peer = {"uploaded": False, "bytes_uploaded": 0, "awaited": True, "missed": 0, "last_seen": 99.0}
    peers = [{**peer, "peer": name, "index": index} for index, name in enumerate("abc")]
    run = hostile_run(rounds=list(history.rounds), peers=peers, indices=history.indices)
    html = page([run])
    assert "<span>Mean loss in it</span><b>1</b>" in html
    rows = re.findall(r"</svg>([abc])</td>.*?<td class=\"number\">(\S+)</td><td class=\"number\">(\S+)</td>", html)
    assert rows == [("a", "1", "1"), ("b", "1", "&ndash;"), ("c", "0", "6")]
    assert "<span>Mean of the latest losses</span><b>3.5</b>" in page([{**run, "asynchronous": True}])
    assert 'megatron_ext_sync_peer_norm{peer="a",run="demo"} 1.5' in metrics_text([{**run, "run": "demo"}])


def test_a_port_that_is_taken_is_refused_by_name():
    with served(lambda: []) as address:
        port = port_of(address)
        with pytest.raises(UserError, match=f"status_port {port}: cannot listen at 127.0.0.1: Address already in use"):
            StatusPage("127.0.0.1", port, lambda: [])


@needs_chromium
def test_in_a_browser_nothing_hostile_runs_and_the_page_follows_the_run(tmp_path: Path):
    answers = iter([hostile_run(), hostile_run(run="second look", open_round=77)])
    asked = []

    def runs() -> list[dict[str, Any]]:
        asked.append(0)
        # The server is gone when the answers are used up.
        return [next(answers)]

    with served(runs) as address:
        html = rendered(address, tmp_path / "followed", milliseconds=4000)
        assert len(asked) == 2, "the page was not asked for again"
        assert "<title>second look: Needs attention</title>" in html and "<b>77</b>" in html
        assert '<body class="away">' not in html

    answers = iter([hostile_run()])
    with served(runs) as address:
        html = rendered(address, tmp_path / "left", milliseconds=4000)
        assert '<body class="away">' in html and "The server has not answered for" in html
        assert re.search("<title>(.*?)</title>", html)[1].startswith("demo &lt;script&gt;")


@needs_chromium
def test_a_browser_shows_the_charts_of_a_real_run(service: Service, tmp_path: Path):
    html = rendered(page_of(service), tmp_path)
    assert html.count("<polyline") >= 6 and html.count("<rect") > 8
    assert "too hot &lt;script&gt;" in html


def test_a_peer_is_shown_to_train_to_upload_and_to_wait(make_service: MakeService):
    service = make_service(peers=2)
    service.extra = {"status_port": 0}
    service.start()
    assert "Idle" in read(page_of(service))
    start = start_values(1)
    with service.client("p0", start) as client:
        values = client.start(start)
        until(lambda: ">training<" in read(page_of(service)), "a peer that trains")
        client.upload(1, values)
        html = read(page_of(service))
        assert ">uploaded<" in html and "In trouble" in html and "1 of 2 peers are here, and a round needs 2" in html
