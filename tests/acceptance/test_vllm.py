"""The whole path with real vLLM: answers, a killed core, a killed worker, nothing left behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec
import psutil
import pytest

from contract.settings import Settings
from headrace.stack.processes import wait_for
from tests.acceptance.harness import World
from tests.faults.engines import break_core


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_real_vllm_answers_survives_its_core_and_leaves_no_orphan(
    settings: Settings, model_path: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    replace = msgspec.structs.replace
    engine = replace(settings.engine, kind="vllm", model_path=str(model_path), max_requests=32, probe_timeout_s=15)
    world = World(replace(settings, engine=engine), tmp_path)
    request.addfinalizer(world.close)
    worker = world.worker().ready(timeout_s=240)

    # Answers of every kind, through every kind of prompt.
    asked = [
        {"id": "chat", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0},
        {"id": "input", "input": "hello", "max_tokens": 8, "temperature": 0},
        {"id": "text", "prompt": "the quick brown", "max_tokens": 8, "logprobs": 1},
        {"id": "tokens", "prompt_token_ids": [20, 21, 22], "max_tokens": 8},
        {"id": "three", "prompt": "a", "max_tokens": 5, "n": 3, "seed": 7, "ignore_eos": True},
        {"id": "too-long", "prompt_token_ids": [20] * 5_000, "max_tokens": 5},
    ]
    world.publish(asked)
    results = {result.id: result for result in world.wait_results(6)}
    assert {name: result.status for name, result in results.items()} == {
        "chat": "ok", "input": "ok", "text": "ok", "tokens": "ok", "three": "ok", "too-long": "invalid",
    }  # fmt: skip
    assert results["chat"].output == results["input"].output
    assert results["three"].output is not None
    assert len(results["three"].output["choices"]) == 3
    assert results["three"].usage.output_tokens == 15
    assert results["too-long"].error is not None
    assert results["too-long"].error.code == "context_length_exceeded"

    # The core dies under load: what it held is answered by the next one, and nobody pays twice.
    core_pids = next(event["pids"] for event in worker.log_events() if event["event"] == "engine.up")
    long_ones = world.requests(60, prompt="count on", max_tokens=400, ignore_eos=True, deadline_ms=600_000)
    world.publish(long_ones)
    wait_for(lambda: 'headrace_engine_requests{class="online"} 32.0' in worker.get("/metrics")[1], 60, "it is full")
    os.kill(core_pids[0], signal.SIGKILL)
    wait_for(lambda: worker.get("/readyz")[0] == 503, 40, "not ready while the engine is dead")
    world.wait_settled(66, timeout_s=300)
    assert world.value("SELECT count(*) FROM results WHERE status = 'ok'") == 65
    assert world.value("SELECT count(*) FROM attempts WHERE waste = 'engine_death' AND charge_usd = 0") == 32
    world.wait_results(66)
    world.assert_sound(66)

    # A core that hangs is found out, and one that is told to end gives no answers: the same becomes of what they held.
    for number, way in enumerate((signal.SIGSTOP, signal.SIGTERM)):
        fields = {"prompt": "count on", "max_tokens": 150, "ignore_eos": True, "deadline_ms": 600_000}
        break_core(world, worker, way, world.requests(32, prefix=f"b{number}", **fields), after_s=0.2)
    world.wait_results(130)
    world.assert_sound(130)
    assert world.query("SELECT id FROM results WHERE status <> 'ok'") == [("too-long",)]

    # The worker dies: its engine goes with it.
    children = psutil.Process(worker.child.pid).children(recursive=True)
    assert children
    worker.child.kill()
    wait_for(lambda: not any(child.is_running() and child.status() != "zombie" for child in children), 20, "no orphan")
    assert world.reconcile() == []
