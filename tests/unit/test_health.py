"""The health server towards impatient probes."""

from __future__ import annotations

import socket
import struct
import threading
import urllib.request

import pytest
from prometheus_client import CollectorRegistry

from gpu_workers.health import HealthServer


def test_probe_that_gives_up_leaves_no_traceback_and_the_next_is_answered(capfd: pytest.CaptureFixture[str]) -> None:
    asked, gone = threading.Event(), threading.Event()

    def live() -> list[str]:
        asked.set()
        gone.wait(10)
        return []

    server = HealthServer(0, live=live, ready=list, registry=CollectorRegistry())
    server.start()
    try:
        probe = socket.create_connection(("127.0.0.1", server.port))
        probe.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
        assert asked.wait(10)
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with a reset
        probe.close()
        gone.set()
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/livez", timeout=10) as answer:
            assert answer.status == 200
    finally:
        server.stop()
    assert "Traceback" not in capfd.readouterr().err
