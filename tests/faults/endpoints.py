"""Endpoints that die or go silent under load, behind the http engine; and requests that kill them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpu_workers.engines import http_server
from gpu_workers.engines.http_server import Record
from headrace.stack.processes import wait_for
from tests.acceptance import test_http_engine
from tests.acceptance.harness import WorkerProcess, free_port
from tests.acceptance.test_http_engine import Endpoint
from tests.faults.row import Row, account, sum_of
from tests.faults.site import Site, carriers, hold_for, metric, model_folder

_SLOTS = 32
_PROBES = {"probe_interval_s": 0.5, "probe_timeout_s": 3.0}
_POISON_REQUESTS = 100
_LOAD_S = 300.0
_WAYS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)


def killed(site: Site, rng: random.Random, rounds: int) -> Row:
    """kill -9 of an OpenAI-compatible endpoint, full of requests; started again at once."""
    return _endpoint("endpoints.killed", _WAYS[:1], site, rng, rounds)


def frozen(site: Site, rng: random.Random, rounds: int) -> Row:
    """SIGSTOP of an endpoint, full of requests, until the worker has noticed (3 s here); then SIGCONT, or a new one."""
    return _endpoint("endpoints.frozen", _WAYS[1:2], site, rng, rounds)


def terminated(site: Site, rng: random.Random, rounds: int) -> Row:
    """SIGTERM of an endpoint, full of requests; started again at once."""
    return _endpoint("endpoints.terminated", _WAYS[2:], site, rng, rounds)


def each_way(site: Site, rng: random.Random, rounds: int) -> Row:
    """An endpoint killed, frozen and terminated in turn."""
    return _endpoint("endpoints.each_way", _WAYS, site, rng, rounds)


def _endpoint(name: str, ways: Sequence[signal.Signals], site: Site, rng: random.Random, rounds: int) -> Row:
    with _running(site.folder) as endpoint, site.world(engine=_at(endpoint.url)) as world:
        worker = world.worker().ready()
        recoveries, ids = [], list[str]()
        for number in range(rounds):
            batch = _long_ones(f"h{number}", 3 * _SLOTS)
            deaths = metric(worker, "headrace_engine_deaths_total")
            world.publish(batch)
            ids += [request["id"] for request in batch]
            _wait_for_work(worker)
            hold_for(rng.uniform(0.0, 0.5))
            started = time.monotonic()
            _break(endpoint, ways[number % len(ways)], worker, rng)
            world.wait_settled(len(ids), timeout_s=120)
            recoveries.append(time.monotonic() - started)
            wait_for(
                lambda deaths=deaths: metric(worker, "headrace_engine_deaths_total") > deaths,  # type: ignore[misc]
                30,
                "the death is noticed",
            )
            worker.ready()
        assert world.query("SELECT id, status FROM results WHERE status <> 'ok'") == []
        return account(name, world, ids, recoveries)


def _break(endpoint: Endpoint, way: signal.Signals, worker: WorkerProcess, rng: random.Random) -> None:
    endpoint.child.send(way)
    if way is signal.SIGSTOP:
        wait_for(lambda: worker.get("/readyz")[0] == 503, 60, "not ready while its endpoint is silent")
        if rng.random() < 0.5:
            endpoint.child.send(signal.SIGCONT)
            return
        endpoint.child.kill()
    endpoint.child.wait(30)
    endpoint.start()


def poison(site: Site, rng: random.Random, rounds: int) -> Row:
    """A request that kills its endpoint among 100 others, a supervisor starts it anew: three deliveries at most."""
    rows = []
    for _ in range(rounds):
        with _running(site.folder) as endpoint, site.world(engine=_at(endpoint.url)) as world:
            test_http_engine.test_request_that_kills_its_endpoint_is_found_in_three_deliveries_and_its_neighbours_are_answered(
                world, endpoint
            )
            rows.append(account("endpoints.poison", world, [f"r-{n}" for n in range(_POISON_REQUESTS)], []))
    return sum_of(rows, rounds=rounds)


def vllm_server(site: Site, rng: random.Random, rounds: int) -> Row:
    """A `vllm serve` of the worker's own: server or core killed, terminated, stopped in turn; none is left twice."""
    folder = site.folder / "serve"
    port = free_port()
    engine = _at(f"http://127.0.0.1:{port}/v1") | {
        "http_serve": True,
        "http_serve_folder": str(folder),
        "model_path": model_folder(),
        "probe_timeout_s": 10.0,
    }
    record = Record(folder, port)
    ways = [(part, way) for way in _WAYS for part in ("server", "core")]
    try:
        with site.world(engine=engine) as world:
            worker = world.worker().ready(_LOAD_S)
            recoveries, ids = [], list[str]()
            for number in range(rounds):
                part, way = ways[number % len(ways)]
                batch = _long_ones(f"s{number}", _SLOTS)
                world.publish(batch)
                ids += [request["id"] for request in batch]
                _wait_for_work(worker)
                before = carriers(record.marker.decode())
                server = record.running_pid()
                os.kill(server if part == "server" else _core(before), way)
                started = time.monotonic()
                world.wait_settled(len(ids), timeout_s=_LOAD_S)
                recoveries.append(time.monotonic() - started)
                wait_for(lambda old=before: not old & carriers(record.marker.decode()), 30, "the old one is gone")  # type: ignore[misc]
                worker.ready()
            assert world.query("SELECT id, status FROM results WHERE status <> 'ok'") == []
            return account("endpoints.vllm_server", world, ids, recoveries)
    finally:
        for one in http_server.records(folder):
            one.end(0.0)


def _core(pids: set[int]) -> int:
    """vLLM's core among the processes of a server."""
    (core,) = [pid for pid in pids if "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text()]
    return core


def _wait_for_work(worker: WorkerProcess) -> None:
    wait_for(lambda: metric(worker, 'headrace_engine_requests{class="online"}') > 0, 60, "the engine has work")


def _at(url: str) -> dict[str, Any]:
    return {"kind": "http", "http_url": url, "max_requests": _SLOTS, **_PROBES}


def _long_ones(prefix: str, count: int) -> list[dict[str, Any]]:
    fields = {"source": "test", "max_tokens": 300, "ignore_eos": True, "deadline_ms": 600_000}
    return [{"id": f"{prefix}-{number}", "prompt": f"count on {number}", **fields} for number in range(count)]


@contextlib.contextmanager
def _running(folder: Path) -> Iterator[Endpoint]:
    endpoint = Endpoint(folder)
    endpoint.start()
    try:
        yield endpoint
    finally:
        endpoint.child.send(signal.SIGCONT)
        endpoint.child.stop()
