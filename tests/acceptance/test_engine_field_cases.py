"""Field cases B18 and B19 through the whole pipeline: formats that kill engines, dead engines that look alive."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from contract.settings import Settings
from headrace.stack.processes import wait_for
from tests.acceptance.harness import WorkerProcess, World
from tests.acceptance.test_http_engine import Endpoint
from tests.data import field_case
from tests.integration.engine_rig import alive

_NOTICED_S = 30.0
_SLOTS = 32

# What was decided per construct; None: answered.
_B19: dict[str, str | None] = {
    "f-1": None,
    "f-2": "structured_outputs",
    "f-3": "structured_outputs",
    "f-4": "structured_outputs",
    "f-5": "response_format.json_schema",
    "f-6": "response_format",
    "f-7": "response_format",
    "f-8": "response_format",
    "f-9": "response_format",
    "f-10": "response_format",
    "f-11": "response_format",
    "f-12": None,
    "f-13": None,
}


def _b19(suffix: str) -> list[dict[str, Any]]:
    return [line["body"] | {"id": f"{line['custom_id']}-{suffix}"} for line in field_case("B19-bad-formats.jsonl")]


def _outcomes(world: World, prefix: str) -> dict[str, tuple[str, str | None]]:
    rows = world.query("SELECT id, status, error_param FROM results WHERE id LIKE %s", f"{prefix}%")
    return {row[0]: (row[1], row[2]) for row in rows}


def _engine_is_up(worker: WorkerProcess) -> bool:
    return "headrace_engine_up 1.0" in worker.get("/metrics")[1]


def _is_full(worker: WorkerProcess) -> bool:
    return f'headrace_engine_requests{{class="online"}} {_SLOTS}.0' in worker.get("/metrics")[1]


def _long_ones(world: World, count: int, prefix: str) -> list[dict[str, Any]]:
    return world.requests(count, prefix=prefix, prompt="count on", max_tokens=250, ignore_eos=True, deadline_ms=600_000)


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_b19_bad_formats_end_as_decided_and_b18_a_frozen_core_is_found_and_replaced(
    settings: Settings, model_path: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    replace = msgspec.structs.replace
    engine = replace(settings.engine, kind="vllm", model_path=str(model_path), max_requests=_SLOTS, probe_timeout_s=5.0)
    pools = {"default": replace(settings.pools["default"], model="test-model")}
    world = World(replace(settings, engine=engine, pools=pools), tmp_path)
    request.addfinalizer(world.close)
    worker = world.worker().ready(timeout_s=240)
    (core, *_) = next(event["pids"] for event in worker.log_events() if event["event"] == "engine.up")

    # Line by line, each with a neighbour that wants JSON too; then the whole file among others at once.
    settled = 0
    for line in _b19("alone"):
        beside = {"id": f"beside {line['id']}", "prompt": "as JSON", "max_tokens": 4, "seed": 1}
        world.publish([line, beside | {"response_format": {"type": "json_object"}}])
        settled += 2
        world.wait_settled(settled, timeout_s=10)
    world.publish(
        [*_b19("together"), *world.requests(100), {"id": "adapter", "prompt": "x", "model": "test-model:lora"}]
    )
    settled += len(_B19) + 101
    world.wait_settled(settled, timeout_s=30)
    expected = {name: ("invalid", param) if param else ("ok", None) for name, param in _B19.items()}
    for way in ("alone", "together"):
        found = {name.removesuffix(f"-{way}"): fate for name, fate in _outcomes(world, "f-").items() if way in name}
        assert found == expected
    assert _outcomes(world, "adapter") == {"adapter": ("invalid", "model")}
    assert set(_outcomes(world, "beside ").values()) == {("ok", None)}
    assert set(_outcomes(world, "r-").values()) == {("ok", None)}
    assert alive(core)
    assert "headrace_engine_deaths_total 0.0" in worker.get("/metrics")[1]
    assert world.read(world.settings.names.dead) == []
    wait_for(lambda: world.lag() == 0, 30, "all committed")

    # The core stops under load, and more comes in.
    world.publish(_long_ones(world, _SLOTS, "held"))
    wait_for(lambda: _is_full(worker), 60, "it is full")
    os.kill(core, signal.SIGSTOP)
    before, started = world.settled(), time.monotonic()
    world.publish(_long_ones(world, _SLOTS, "late"))
    wait_for(lambda: worker.get("/readyz")[0] == 503, _NOTICED_S, "not ready while its core is frozen")
    assert time.monotonic() - started < _NOTICED_S
    assert not _engine_is_up(worker)
    assert world.lag() >= 2 * _SLOTS - (world.settled() - before), "what is in hand is not committed"
    settled += 2 * _SLOTS
    world.wait_settled(settled, timeout_s=120)
    wait_for(lambda: worker.get("/readyz")[0] == 200 and _engine_is_up(worker), 30, "ready again by itself")
    assert not alive(core)
    for prefix in ("held", "late"):
        assert world.value("SELECT count(*) FROM results WHERE status = 'ok' AND output_tokens = 250 AND id LIKE %s",
                           f"{prefix}-%") == _SLOTS  # fmt: skip
    world.wait_results(settled)
    world.assert_sound(settled)
    assert worker.terminate() == 0
    assert world.reconcile() == []


def test_b18_worker_whose_engine_stays_dead_pulls_nothing_and_another_answers_what_it_held(
    settings: Settings, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    endpoint = Endpoint(tmp_path)
    endpoint.start()
    request.addfinalizer(endpoint.child.stop)
    replace = msgspec.structs.replace
    engine = replace(settings.engine, kind="http", http_url=endpoint.url, max_requests=_SLOTS)
    world = World(replace(settings, engine=engine), tmp_path)
    request.addfinalizer(world.close)
    worker = world.worker().ready()
    world.publish(_long_ones(world, 2 * _SLOTS, "held"))
    wait_for(lambda: _is_full(worker), 30, "it is full")
    endpoint.child.kill()
    wait_for(lambda: worker.get("/readyz")[0] == 503, _NOTICED_S, "not ready without its engine")
    assert not _engine_is_up(worker)
    settled, lag = world.settled(), world.lag()
    world.publish(world.requests(200, prefix="late", deadline_ms=600_000))
    wait_for(lambda: world.lag() >= lag + 200, 30, "the late ones wait in their topic")
    assert world.settled() == settled
    assert worker.get("/readyz")[0] == 503

    world.settings = settings  # an engine that lives
    other = world.worker().ready()
    assert worker.terminate() == 0
    world.wait_settled(2 * _SLOTS + 200)
    assert world.query("SELECT id, status FROM results WHERE status <> 'ok'") == []
    assert world.value("SELECT count(*) FROM results WHERE output_tokens = 0") == 0
    world.wait_results(2 * _SLOTS + 200)
    wait_for(lambda: world.lag() == 0, 30, "all committed")
    world.assert_sound(2 * _SLOTS + 200)
    assert other.terminate() == 0
    assert world.reconcile() == []
