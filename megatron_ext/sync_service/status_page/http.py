# SPDX-License-Identifier: Apache-2.0
"""The HTTP server of the status page: it answers GET and changes nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.sync_service.channel.address import is_loopback
from megatron_ext.sync_service.status_page.assets import SCRIPT, STYLE
from megatron_ext.sync_service.status_page.metrics import metrics_text
from megatron_ext.sync_service.status_page.page import page
from megatron_ext.version import __version__

__all__ = ["StatusPage"]

log = logging.getLogger(__name__)

_SECONDS = 10.0
"""Within which a caller has to have sent its request and to have taken the answer."""

Overview = Callable[[], Sequence[Mapping[str, Any]]]


def _hash(content: str) -> str:
    return base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


_HEADERS = {
    # Nothing runs or is loaded but what is written here, whatever names and reasons on the page should say.
    "Content-Security-Policy": (
        f"default-src 'none'; style-src 'sha256-{_hash(STYLE)}'; script-src 'sha256-{_hash(SCRIPT)}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class StatusPage:
    """Serves the page from threads of its own."""

    def __init__(self, host: str, port: int, overview: Overview) -> None:
        """Begin to serve.

        Args:
            host: address to listen at.
            port: of it; 0 for a free one.
            overview: returns what `overview_of` makes of every run; called from several threads.

        Raises:
            UserError: it cannot be listened there.
        """
        host = host.strip("[]")
        try:
            self._server = _Server(host, port, overview)
        except OSError as error:
            raise UserError(
                f"status_port {port}: cannot listen at {host}: {error.strerror}; give another status_port or "
                "status_host"
            ) from error
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{self._server.server_port}/"
        threading.Thread(target=self._server.serve_forever, name="status", daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


_MOST_CALLERS = 32
"""At a time. Each has a thread and a file descriptor, which the rounds must not run out of."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # A browser asks again soon enough; the peers' calls have the processor's time.
    request_queue_size = 16

    def __init__(self, host: str, port: int, overview: Overview) -> None:
        self.overview = overview
        self.is_local = is_loopback(host)
        if ":" in host:
            self.address_family = socket.AF_INET6
        self._free = threading.BoundedSemaphore(_MOST_CALLERS)
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Listen, without asking the network what this machine is called."""
        TCPServer.server_bind(self)
        self.server_port = int(self.server_address[1])

    def get_request(self) -> tuple[Any, Any]:
        """Take the next caller."""
        try:
            return super().get_request()
        except OSError:
            # Without a free descriptor the caller stays where it is, and this would be tried again at once.
            time.sleep(0.1)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in another thread, or hang up where there are too many."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # there is no thread that would
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer within the time that a caller has."""
        deadline = threading.Timer(_SECONDS, _hang_up, [request])
        deadline.daemon = True
        deadline.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            deadline.cancel()
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Keep the log for this server's own errors: callers come and go."""
        if isinstance(sys.exception(), OSError):
            log.debug("status page: %s has gone", client_address, exc_info=True)
        else:
            log.exception("status page: cannot answer %s", client_address)


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):  # it is closed already
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = f"megatron_ext/{__version__}"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer with the page, or with the same as data."""
        # A page of another host that a browser was led to under this address must not read what is here.
        if self.server.is_local and not is_loopback(_host_of(self.headers.get("Host", "localhost"))):
            self._answer(421, "text/plain", "this page is for callers on the same machine; use localhost\n")
            return
        path = self.path.partition("?")[0]
        if path == "/":
            self._answer(200, "text/html", page(self.server.overview()))
        elif path == "/status.json":
            content = {"version": __version__, "runs": list(self.server.overview())}
            self._answer(200, "application/json", json.dumps(content) + "\n")
        elif path == "/metrics":
            self._answer(200, "text/plain; version=0.0.4", metrics_text(self.server.overview()))
        else:
            self._answer(404, "text/plain", "there are /, /status.json and /metrics\n")

    do_HEAD = do_GET

    def _answer(self, code: int, kind: str, content: str) -> None:
        body = content.encode()
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the log for the rounds."""
        log.debug(format, *args)


def _host_of(header: str) -> str:
    """Return the host of a Host header, without the port."""
    return header.partition("]")[0] + "]" if header.startswith("[") else header.partition(":")[0]
