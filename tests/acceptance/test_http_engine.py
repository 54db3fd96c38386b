"""A worker whose engine is an endpoint, end to end; the endpoint is killed under load and comes back."""

from __future__ import annotations

import sys
import urllib.request
from pathlib import Path

import msgspec
import pytest

from contract.settings import Settings
from headrace.stack.processes import Child, wait_for
from tests.acceptance.harness import World, free_port


def test_worker_at_an_endpoint_answers_survives_its_death_and_charges_once(
    settings: Settings, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/v1"
    endpoint = Child(
        "endpoint", [sys.executable, "-m", "tests.integration.http_endpoint", str(port)], tmp_path / "endpoint.log",
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    request.addfinalizer(endpoint.stop)

    def up() -> bool:
        endpoint.start()
        try:
            return bool(urllib.request.urlopen(f"{url}/models", timeout=5).status == 200)
        except OSError:
            return False

    wait_for(up, 30, "the endpoint listens")
    engine = msgspec.structs.replace(settings.engine, kind="http", http_url=url, max_requests=32)
    world = World(msgspec.structs.replace(settings, engine=engine), tmp_path)
    request.addfinalizer(world.close)
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
    endpoint.kill()
    wait_for(lambda: worker.get("/readyz")[0] == 503, 30, "not ready without its endpoint")
    wait_for(up, 30, "the endpoint listens again")
    world.wait_settled(203, timeout_s=90)
    assert world.query("SELECT id, status, error_code FROM results WHERE status <> 'ok' AND id <> 'wrong'") == []
    assert worker.get("/readyz")[0] == 200
    world.wait_results(203)
    world.assert_sound(203)
    assert worker.terminate() == 0
    assert world.reconcile() == []
