"""The scrape endpoint of a service: ``GET /metrics`` in Prometheus' text format.

Invariants: it has a thread of its own and touches no event loop; with a token set it needs it, like every
other door of the service.
"""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from prometheus_client import make_wsgi_app

from services.runtime import auth
from services.runtime.errors import Unauthenticated
from services.runtime.ports import port_in_use
from services.runtime.settings import split_address

StartResponse = Callable[..., Any]


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Silent(WSGIRequestHandler):
    timeout = 10  # of a client that sends nothing

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the base class's name)
        """A scrape is no event."""


class MetricsServer:
    """Serves what ``reader`` collects at HOST:PORT; raises InvalidInput when the port is taken."""

    def __init__(self, service: str, listen: str) -> None:
        self.reader = PrometheusMetricReader()
        self._service = service
        self._token = auth.token()
        self._app = make_wsgi_app()
        host, port = split_address(listen)
        try:
            self._server = make_server(host, port, self._answer, _Server, _Silent)
        except OSError as exc:
            raise port_in_use(host, port) from exc
        self.address = f"{host}:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def _answer(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        try:
            auth.check(self._token, environ.get("HTTP_AUTHORIZATION"), where=self._service)
        except Unauthenticated:
            start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Length", "0")])
            return [b""]
        if environ.get("PATH_INFO") != "/metrics":
            start_response("404 Not Found", [("Content-Length", "0")])
            return [b""]
        found: Iterable[bytes] = self._app(environ, start_response)
        return found

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
