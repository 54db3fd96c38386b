"""A worker whose engine is an endpoint, end to end; the endpoint is killed under load and comes back."""

from __future__ import annotations

import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from contract.settings import Settings
from headrace.stack.processes import Child, wait_for
from tests.acceptance.harness import World, free_port


class Endpoint:
    """An endpoint as a process of its own, on a port that it keeps over restarts."""

    def __init__(self, folder: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}/v1"
        self.child = Child(
            "endpoint", [sys.executable, "-m", "tests.integration.http_endpoint", str(port)], folder / "endpoint.log",
            cwd=Path(__file__).parents[2],
        )  # fmt: skip

    def start(self) -> None:
        """Returns when it listens; harmless while it runs."""
        wait_for(self._listens, 30, "the endpoint listens")

    def _listens(self) -> bool:
        self.child.start()
        try:
            return bool(urllib.request.urlopen(f"{self.url}/models", timeout=5).status == 200)
        except OSError:
            return False


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[Endpoint]:
    one = Endpoint(tmp_path)
    one.start()
    yield one
    one.child.stop()


@pytest.fixture
def world(settings: Settings, tmp_path: Path, endpoint: Endpoint) -> Iterator[World]:
    engine = msgspec.structs.replace(settings.engine, kind="http", http_url=endpoint.url, max_requests=32)
    one = World(msgspec.structs.replace(settings, engine=engine), tmp_path)
    yield one
    one.close()


def test_worker_at_an_endpoint_answers_survives_its_death_and_charges_once(world: World, endpoint: Endpoint) -> None:
    worker = world.worker().ready()

    world.publish(
        [
            {"id": "chat", "input": "hello", "max_tokens": 8},
            {"id": "text", "prompt": "FAULT:cached=3 with a cached part", "max_tokens": 8, "ignore_eos": True},
            {"id": "wrong", "prompt": "x", "logit_bias": {"900000": 1}},
        ]
    )
    results = {result.id: result for result in world.wait_results(3)}
    assert {name: result.status for name, result in results.items()} == {
        "chat": "ok", "text": "ok", "wrong": "invalid",
    }  # fmt: skip
    assert results["text"].usage.cached_tokens == 3
    assert results["text"].usage.output_tokens == 8
    assert results["wrong"].error is not None
    assert results["wrong"].error.param == "logit_bias"

    world.publish(world.requests(200, prompt="count on", max_tokens=150, ignore_eos=True, deadline_ms=600_000))
    wait_for(lambda: 'headrace_engine_requests{class="online"} 32.0' in worker.get("/metrics")[1], 30, "it is full")
    endpoint.child.kill()
    wait_for(lambda: worker.get("/readyz")[0] == 503, 30, "not ready without its endpoint")
    endpoint.start()
    world.wait_settled(203, timeout_s=90)
    assert world.query("SELECT id, status, error_code FROM results WHERE status <> 'ok' AND id <> 'wrong'") == []
    assert worker.get("/readyz")[0] == 200
    world.wait_results(203)
    world.assert_sound(203)
    assert worker.terminate() == 0
    assert world.reconcile() == []


def test_request_that_kills_its_endpoint_is_found_in_three_deliveries_and_its_neighbours_are_answered(
    world: World, endpoint: Endpoint
) -> None:
    worker = world.worker().ready()
    requests = world.requests(100, deadline_ms=600_000)
    requests[50]["prompt"] = "FAULT:crash x"
    stop = threading.Event()

    def supervise() -> None:
        while not stop.wait(0.1):
            endpoint.child.start()

    supervisor = threading.Thread(target=supervise)
    supervisor.start()
    try:
        world.publish(requests)
        world.wait_settled(100, timeout_s=90)
    finally:
        stop.set()
        supervisor.join()
    assert world.query("SELECT id, status, error_code FROM results WHERE status <> 'ok'") == [
        ("r-50", "failed", "engine_death")
    ]
    assert "headrace_engine_deaths_total 3.0" in worker.get("/metrics")[1]
    world.wait_results(100)
    world.assert_sound(100)
    assert worker.terminate() == 0
    assert world.reconcile() == []
