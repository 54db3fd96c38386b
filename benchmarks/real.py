"""A stretch of work with real vLLM: through one headrace worker, or through a program beside it.

Start-up is never in it: headrace's clock starts when the worker is given its first partitions (its engine is warm by
then, and the requests wait in their topics), and stops when Postgres has committed the last result. Programs
say themselves how long they took, after a warm-up of the same kind.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psycopg

from benchmarks import asks
from benchmarks.asks import Ask
from benchmarks.site import ROOT, Site
from contract.settings import Engine
from gpu_workers.engines import vllm_profile
from headrace.stack.model import make_tiny_model
from headrace.stack.processes import Child
from tests.acceptance.harness import WorkerProcess, World

READY_S = 240.0
DONE_S = 300.0
WARM_UP = 64
_LOOK_EVERY_S = 0.25
_RUNNING = re.compile(r'^headrace_engine_requests\{class="[^"]+"\} (\S+)$', re.MULTILINE)


@dataclasses.dataclass(frozen=True, slots=True)
class Pace:
    """How long a contender took for how much."""

    requests: int
    output_tokens: int
    seconds: float
    running: Sequence[tuple[float, float]] = ()
    """Seconds since the start, and requests in the engine then."""

    @property
    def per_s(self) -> float:
        return self.requests / self.seconds

    @property
    def tokens_per_s(self) -> float:
        """Output tokens."""
        return self.output_tokens / self.seconds


def sections(**engine: Any) -> dict[str, dict[str, Any]]:
    """Settings for offline work with the tiny model: one class, so that it has all slots; the rest is default."""
    model = str(make_tiny_model(ROOT / ".headrace" / "tiny-model"))
    return {
        "worker": {"classes": ["offline"]},
        "pools": {"default": {"tokenizer": model}},
        "engine": {"kind": "vllm", "model_path": model, **engine},
    }


def through_headrace(
    site: Site, given: Sequence[Ask], shape: Callable[[Ask], dict[str, Any]] = Ask.prompt, **overlay: Mapping[str, Any]
) -> Pace:
    """One worker; raises when a request was not answered with all its tokens, or the books do not add up."""
    with site.world(**(sections() | overlay)) as world:
        asks.publish(world, [shape(one) for one in given], "offline")
        site.calm()
        worker = world.worker()
        samples = _until_settled(world, worker, len(given))
        check(world, given)
        start_s, seconds = _stretch(world, worker)
        if worker.terminate() or world.reconcile():
            raise RuntimeError(f"the worker's books do not add up\n{worker.child.tail()}")
        running = [(at_s - start_s, held) for at_s, held in samples if at_s >= start_s]
        return Pace(len(given), sum(one.max_tokens for one in given), seconds, running)


def check(world: World, given: Sequence[Ask]) -> None:
    """Every request was answered, with as many tokens as it asked for."""
    wanted = (len(given), sum(one.max_tokens for one in given))
    found = world.query("SELECT count(*), sum(output_tokens)::bigint FROM results WHERE status = 'ok'")[0]
    if found != wanted:
        raise RuntimeError(f"answered requests and their tokens: {found}, not {wanted}")


def _until_settled(world: World, worker: WorkerProcess, count: int) -> list[tuple[float, float]]:
    """Wall clock and requests in the engine, a few times a second."""
    samples: list[tuple[float, float]] = []
    next_look_s = 0.0

    def done() -> bool:
        nonlocal next_look_s
        if time.monotonic() < next_look_s:
            return False
        next_look_s = time.monotonic() + _LOOK_EVERY_S
        page = worker.get("/metrics")[1]
        samples.append((time.time(), sum(float(held) for held in _RUNNING.findall(page))))
        return len(samples) % 4 == 0 and world.settled() >= count

    worker.child.wait_until(done, READY_S + DONE_S, f"{count} settled")
    return samples


def _stretch(world: World, worker: WorkerProcess) -> tuple[float, float]:
    """When the worker was given its first partitions (wall clock, s), and the seconds from then to the last commit."""
    assigned = [
        dt.datetime.fromisoformat(event["timestamp"]).timestamp()
        for event in worker.log_events()
        if event["event"] == "intake.assigned" and event["partitions"]
    ]
    return min(assigned), commits(world.settings.postgres.url, "results")[-1][0] - min(assigned)


def commits(url: str, table: str) -> list[tuple[float, int]]:
    """When each transaction was committed (wall clock, s), and its rows."""
    with psycopg.connect(url) as connection:
        return connection.execute(
            f"SELECT extract(epoch FROM pg_xact_commit_timestamp(xmin))::float8, count(*) FROM {table} GROUP BY 1"
            " ORDER BY 1".encode()
        ).fetchall()


def program(name: str, folder: Path, given: Mapping[str, Any], python: Path = Path(sys.executable)) -> Child:
    """``peers/<name>.py`` with one JSON object, vLLM's environment as the worker sets it; not yet started."""
    script = Path(__file__).parent / "peers" / f"{name}.py"
    folder.mkdir(parents=True, exist_ok=True)
    argv: list[str | Path] = [python, script, json.dumps(given)]
    return Child(name, argv, folder / f"{name}.log", env=vllm_profile.environment(), cwd=folder)


def outcome(name: str, folder: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """What such a program wrote to its ``out``. Raises ``StackError`` when it fails."""
    out = folder / f"{name}.json"
    child = program(name, folder, {**given, "out": str(out)})
    child.start()
    try:
        if child.wait(READY_S + DONE_S):
            raise RuntimeError(f"{name} failed\n{child.tail()}")
    finally:
        child.stop()
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def arguments(engine: Engine) -> dict[str, Any]:
    """vLLM's arguments as the worker gives them."""
    return vllm_profile.engine_arguments(engine)
