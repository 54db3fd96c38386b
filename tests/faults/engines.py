"""Engines that die or go deaf under load; and requests that kill them."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from typing import Any

from gpu_workers.guard import MARKER
from headrace.stack.processes import wait_for
from tests.acceptance import test_poison
from tests.acceptance.harness import WorkerProcess, World
from tests.faults.row import Row, account, sum_of
from tests.faults.site import Site, carriers, hold_for, metric, model_folder, requests
from tests.integration.engine_rig import alive

_ROUND_REQUESTS = 300
_PROBES = {"probe_interval_s": 0.5, "probe_timeout_s": 3.0}
_GIVEN_UP_AFTER = 3
_SLOTS = 32
_LOAD_S = 300.0
"""A model may take this long to load where much else runs."""


def simulated_died(site: Site, rng: random.Random, rounds: int) -> Row:
    """The engine dies once with a request in it and is started anew."""
    return _simulated("engines.simulated_died", "die-once", 1, site, rng, rounds)


def simulated_hung(site: Site, rng: random.Random, rounds: int) -> Row:
    """A request turns each core deaf, three a round until it is given up; a probe tells (after 3 s here)."""
    return _simulated("engines.simulated_hung", "hang", _GIVEN_UP_AFTER, site, rng, rounds)


def _simulated(name: str, word: str, deaths: int, site: Site, rng: random.Random, rounds: int) -> Row:
    """``deaths`` engines a round; who caused ``_GIVEN_UP_AFTER`` of them fails, and nobody else."""
    with site.world(engine=_PROBES) as world:
        worker = world.worker().ready()
        recoveries, ids, given_up = [], list[str](), set[str]()
        for number in range(rounds):
            batch = requests(rng, _ROUND_REQUESTS, slow_ms=300, prefix=f"e{number}", deadline_ms=600_000)
            killer = rng.randrange(_ROUND_REQUESTS)
            batch[killer]["prompt"] = f"FAULT:{word} round {number}"
            started = time.monotonic()
            world.publish(batch)
            ids += [request["id"] for request in batch]
            given_up |= {batch[killer]["id"]} if deaths == _GIVEN_UP_AFTER else set()
            world.wait_settled(len(ids), timeout_s=120)
            recoveries.append(time.monotonic() - started)
            assert f"headrace_engine_deaths_total {deaths * (number + 1)}.0" in worker.get("/metrics")[1]
        assert {id for (id,) in world.query("SELECT id FROM results WHERE status <> 'ok'")} == given_up
        return account(name, world, ids, recoveries)


def poison(site: Site, rng: random.Random, rounds: int) -> Row:
    """A request, then two at once, that kills every engine among 300 others, 3 workers: three deliveries at most."""
    rows = []
    for killers in (1, 2) * rounds:
        with site.world() as world:
            test_poison.test_request_that_kills_the_engine_is_found_and_its_neighbours_are_answered(world, killers)
            rows.append(account("engines.poison", world, [f"r-{n}" for n in range(test_poison.REQUESTS)], []))
    return sum_of(rows, rounds=rounds)


# -- vLLM -----------------------------------------------------------------------------------------


def vllm_killed(site: Site, rng: random.Random, rounds: int) -> Row:
    """kill -9 of vLLM's core, full of requests. No process is left of it."""
    return _vllm("engines.vllm_killed", signal.SIGKILL, site, rng, rounds)


def vllm_frozen(site: Site, rng: random.Random, rounds: int) -> Row:
    """SIGSTOP of vLLM's core, full of requests: a round trip of at most 30 s tells. No process is left of it."""
    return _vllm("engines.vllm_frozen", signal.SIGSTOP, site, rng, rounds)


def vllm_terminated(site: Site, rng: random.Random, rounds: int) -> Row:
    """SIGTERM of vLLM's core, full of requests: what it aborts is run again. No process is left of it."""
    return _vllm("engines.vllm_terminated", signal.SIGTERM, site, rng, rounds)


def _vllm(name: str, way: signal.Signals, site: Site, rng: random.Random, rounds: int) -> Row:
    with site.world(engine=_real_vllm()) as world:
        worker = world.worker().ready(_LOAD_S)
        recoveries, ids = [], list[str]()
        for number in range(rounds):
            batch = _long_ones(f"v{number}")
            recoveries.append(break_core(world, worker, way, batch, after_s=rng.uniform(0.0, 0.5)))
            ids += [request["id"] for request in batch]
        assert world.query("SELECT id, status FROM results WHERE status <> 'ok'") == []
        return account(name, world, ids, recoveries)


def break_core(
    world: World, worker: WorkerProcess, way: signal.Signals, batch: Sequence[dict[str, Any]], *, after_s: float
) -> float:
    """Sends ``way`` to vLLM's core ``after_s`` after ``batch`` reached it; seconds until all of it was settled."""
    settled, deaths = world.settled(), metric(worker, "headrace_engine_deaths_total")
    lives = _lives(worker)
    (core, *others) = lives[-1]["pids"]
    world.publish(batch)
    wait_for(lambda: metric(worker, 'headrace_engine_requests{class="online"}') > 0, 60, "the engine has work")
    hold_for(after_s)
    os.kill(core, way)
    started = time.monotonic()
    world.wait_settled(settled + len(batch), timeout_s=_LOAD_S)
    took_s = time.monotonic() - started
    wait_for(lambda: metric(worker, "headrace_engine_deaths_total") == deaths + 1, 30, "one death")
    wait_for(lambda: not any(map(alive, [core, *others])), 30, "nothing of the old core is left")
    wait_for(lambda: len(_lives(worker)) > len(lives), _LOAD_S, "the next core is up")
    return took_s


def _lives(worker: WorkerProcess) -> list[dict[str, Any]]:
    """What the worker said of each core that came up."""
    return [event for event in worker.log_events() if event["event"] == "engine.up"]


def vllm_worker_killed(site: Site, rng: random.Random, rounds: int) -> Row:
    """kill -9 of a worker whose vLLM is full: no process of it is left; recovery: the next one has loaded its model."""
    with site.world(engine=_real_vllm()) as world:
        worker = world.worker().ready(_LOAD_S)
        recoveries, ids = [], list[str]()
        for number in range(rounds):
            batch = _long_ones(f"w{number}")
            world.publish(batch)
            ids += [request["id"] for request in batch]
            one = worker
            wait_for(lambda one=one: metric(one, 'headrace_engine_requests{class="online"}') > 0, 60, "it has work")  # type: ignore[misc]
            hold_for(rng.uniform(0.0, 0.5))
            assert carriers(f"{MARKER}={worker.name}:"), "a worker without a process of its engine"
            worker.child.kill()
            started = time.monotonic()
            wait_for(lambda one=one: not carriers(f"{MARKER}={one.name}:"), 30, "no orphan")  # type: ignore[misc]
            worker = world.worker()
            world.wait_settled(len(ids), timeout_s=_LOAD_S)
            recoveries.append(time.monotonic() - started)
            worker.ready()
        assert world.query("SELECT id, status FROM results WHERE status <> 'ok'") == []
        return account("engines.vllm_worker_killed", world, ids, recoveries)


def _real_vllm() -> dict[str, Any]:
    return {"kind": "vllm", "model_path": model_folder(), "max_requests": _SLOTS}


def _long_ones(prefix: str) -> list[dict[str, Any]]:
    """As many as the engine holds, each of hundreds of steps: a core takes seconds."""
    fields = {"source": "test", "max_tokens": 500, "ignore_eos": True, "deadline_ms": 600_000}
    return [{"id": f"{prefix}-{number}", "prompt": f"count on {number}", **fields} for number in range(_SLOTS)]
