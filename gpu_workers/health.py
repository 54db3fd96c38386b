"""Liveness, readiness and metrics of a worker over HTTP: ``/livez``, ``/readyz``, ``/metrics``.

Live: the event loop turned lately. Ready: the engine is warm, the partitions are in hand, nothing
holds the intake. Both say why not, as JSON.
"""

from __future__ import annotations

import http.server
import sys
import threading
from collections.abc import Callable
from typing import Any

import orjson
from prometheus_client import CollectorRegistry, generate_latest

Check = Callable[[], list[str]]
"""Reasons why not; empty: yes."""


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a probe that did not wait for its answer is no news
            super().handle_error(request, client_address)


class HealthServer:
    """Serves on ``port`` (0: any free one, see ``port``) from ``start`` until ``stop``."""

    def __init__(self, port: int, *, live: Check, ready: Check, registry: CollectorRegistry) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self._answer(200, generate_latest(registry), "text/plain; version=0.0.4")
                elif self.path in ("/livez", "/readyz"):
                    reasons = live() if self.path == "/livez" else ready()
                    body = orjson.dumps({"ok": not reasons, "reasons": reasons})
                    self._answer(503 if reasons else 200, body, "application/json")
                else:
                    self._answer(404, b'{"error":"not found: try /livez, /readyz or /metrics"}', "application/json")

            def _answer(self, status: int, body: bytes, kind: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Probes come every second; they are not worth a line."""

        self._server = _Server(("0.0.0.0", port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="health", daemon=True)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Closes the port; harmless twice."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
