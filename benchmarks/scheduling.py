"""What scheduling is worth: short requests beside long ones, and online requests beside offline ones.

The engine is a timed model of a GPU (``gpu_workers/engines/simulated_gpu.py``): its steps take the time that a GPU's
would, so that two cores are enough to see queues. Broker, database, publisher and worker are real.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from benchmarks import asks, open_loop
from benchmarks.asks import Ask, Kind
from benchmarks.figure import Goal
from benchmarks.open_loop import Arrival, Publisher, p99
from benchmarks.site import Site
from contract.settings import Settings
from headrace.stack.processes import wait_for
from tests.acceptance.harness import World

LOADS = ("0.9", "1.2")
"""Of what one queue can carry."""
SHORT_AND_VERY_LONG = (Kind(90, (10, 40), (8, 32)), Kind(10, (600, 900), (256, 512)))
_VERY_LONG_TOKENS = 256
GPU: Mapping[str, Any] = {
    "simulated_prefill_tokens_per_s": 200_000.0,
    "simulated_step_ms": 4.0,
    "simulated_step_ms_per_request": 0.025,
    "max_model_len": 4_096,
}
"""64 slots; full, a step takes 5.6 ms: 11,400 tokens a second at most."""
_LOAD_S = 24.0
"""The first quarter of it is load, not figures: a very long request takes 1.4 to 2.9 s."""
_DONE_S = 120.0

ONLINE = (Kind(100, (10, 40), (8, 32)),)
OFFLINE = (Kind(100, (20, 200), (32, 400)),)
SLOWER_GPU: Mapping[str, Any] = {
    "simulated_prefill_tokens_per_s": 200_000.0,
    "simulated_step_ms": 8.0,
    "simulated_step_ms_per_request": 0.05,
}
"""The default; nothing of it is short for an online request but the slots."""
ONLINE_PER_S = 24.0
_PHASE_S = 18.0


def _bucket_goals(mode: str, targets: Mapping[str, str]) -> tuple[Goal, ...]:
    engine = {"continuous": "continuous engine", "closed": "closed batches of 64"}[mode]
    goals = []
    for load in LOADS:
        at = f"{engine}, {load} of capacity"
        goals += [
            Goal(
                f"buckets.short_p99_{mode}_{load}",
                f"short requests' P99, {at}: bucket topics ÷ one queue",
                "×",
                targets[load],
            ),
            Goal(f"buckets.long_p50_{mode}_{load}", f"the price: very long requests' P50, {at}", "×"),
            Goal(f"buckets.one_queue_short_p99_{mode}_{load}_ms", f"short requests' P99, {at}, one queue", "ms"),
        ]
    return (*goals, Goal(f"buckets.one_queue_{mode}_per_s", f"capacity of one queue, {engine}", "/s"))


CONTINUOUS = _bucket_goals("continuous", {"0.9": "report", "1.2": "≤ 0.7"})
CLOSED = _bucket_goals("closed", {"0.9": "≤ 0.7", "1.2": "≤ 0.7"})
BESIDE_OFFLINE = (
    Goal("online.p99_beside_offline", "online P99 while offline fills the engine ÷ alone", "×", "≤ 1.5"),
    Goal("online.offline_beside_online", "offline output tokens a second beside online ÷ alone", "×", "≥ 0.8"),
    Goal("online.p50_beside_offline", "online P50 while offline fills the engine ÷ alone", "×"),
    Goal("online.engine_p99_beside_offline", "of it, in the engine: P99 ÷ alone", "×"),
    Goal("online.alone_p99_ms", "online P99 alone", "ms"),
    Goal("online.alone_p50_ms", "online P50 alone", "ms"),
    Goal("online.offline_alone_tokens_per_s", "offline output tokens a second alone", "/s"),
)


# -- short beside very long -----------------------------------------------------------------------


def short_p99_continuous(site: Site) -> dict[str, float]:
    """One request in ten is very long: bucket topics and a long share against one queue, continuous engine."""
    return _short_p99(site, "continuous")


def short_p99_closed(site: Site) -> dict[str, float]:
    """One request in ten is very long: bucket topics against one queue, closed batches of 64."""
    return _short_p99(site, "closed")


def _short_p99(site: Site, mode: str) -> dict[str, float]:
    """Two workers are given the same requests at the same moments; capacity is what one queue carries."""
    closed = mode == "closed"
    classes = msgspec.to_builtins(Settings().classes)
    if closed:
        classes["online"]["window"]["max_requests"] = Settings().engine.max_requests
    sections = {"engine": {**GPU, "closed_batches": closed}, "classes": classes, "worker": {"classes": ["online"]}}
    one_queue = {"edges": {"all": 1_000_000_000}}
    with site.world(**sections, buckets=one_queue) as plain, site.world(**sections) as bucketed:
        worlds = (plain, bucketed)
        workers = [world.worker() for world in worlds]
        for worker in workers:
            worker.ready()
        probe = asks.make(SHORT_AND_VERY_LONG, site.scaled(384 if closed else 1_600), "probe")
        capacity_per_s = _capacity_per_s(plain, probe)
        values = {f"buckets.one_queue_{mode}_per_s": capacity_per_s}
        sent = {plain: len(probe), bucketed: 0}
        for load in LOADS:
            per_s = capacity_per_s * float(load)
            given = asks.make(SHORT_AND_VERY_LONG, site.scaled(round(per_s * _LOAD_S)), f"load{load}")
            plan = open_loop.poisson(given, per_s, load)
            open_loop.publish([Publisher(world.settings, "online") for world in worlds], plan)
            for world in worlds:
                sent[world] += len(given)
                world.wait_settled(sent[world], _DONE_S)
            values |= _compared(plain, bucketed, plan, f"{mode}_{load}")
        for world, worker in zip(worlds, workers, strict=True):
            if worker.terminate() or world.reconcile():
                raise RuntimeError(f"the worker's books do not add up\n{worker.child.tail()}")
        return values


def _capacity_per_s(world: World, given: Sequence[Ask]) -> float:
    """Requests a second that enter a full engine, the first quarter left out; they all wait from the start on."""
    asks.publish(world, [ask.prompt() for ask in given], "online")
    world.wait_settled(len(given), _DONE_S)
    entered_ms = sorted(one.appended_ms + one.queue_ms for one in open_loop.served(world, given).values())
    since_ms, until_ms = entered_ms[len(given) // 4], entered_ms[-1]
    return sum(since_ms <= at_ms < until_ms for at_ms in entered_ms) / (until_ms - since_ms) * 1_000


def _compared(plain: World, bucketed: World, plan: Sequence[Arrival], suffix: str) -> dict[str, float]:
    given = [ask for at_s, ask in plan if at_s >= plan[-1].at_s / 4]
    short = [ask for ask in given if ask.max_tokens < _VERY_LONG_TOKENS]
    long = [ask for ask in given if ask.max_tokens >= _VERY_LONG_TOKENS]
    plain_ms, bucketed_ms = _latencies_ms(plain, short), _latencies_ms(bucketed, short)
    return {
        f"buckets.short_p99_{suffix}": p99(bucketed_ms) / p99(plain_ms),
        f"buckets.long_p50_{suffix}": statistics.median(_latencies_ms(bucketed, long))
        / statistics.median(_latencies_ms(plain, long)),
        f"buckets.one_queue_short_p99_{suffix}_ms": p99(plain_ms),
    }


def _latencies_ms(world: World, given: Sequence[Ask]) -> list[float]:
    return [one.latency_ms for one in open_loop.served(world, given).values()]


# -- online beside offline ------------------------------------------------------------------------


def p99_beside_offline(site: Site) -> dict[str, float]:
    """Short online requests at the same times, alone and while offline requests fill the engine."""
    seconds = _PHASE_S * site.scale
    given = asks.make(ONLINE, round(ONLINE_PER_S * seconds))
    plan = open_loop.poisson(given, ONLINE_PER_S, "online")
    with site.world(engine=SLOWER_GPU) as world:
        worker = world.worker().ready()
        open_loop.publish([Publisher(world.settings, "online")], plan)
        world.wait_settled(len(given), _DONE_S)
        alone = list(open_loop.served(world, given).values())
        if worker.terminate() or world.reconcile():
            raise RuntimeError(f"the worker's books do not add up\n{worker.child.tail()}")
    with site.world(engine=SLOWER_GPU) as world:
        worker = world.worker().ready()
        # Enough that none of it is left waiting: 64 slots could not do so much in the time.
        backlog = asks.make(OFFLINE, round(40 * (2 * seconds + 15)), "bulk")
        asks.publish(world, [ask.prompt() for ask in backlog], "offline")
        # Tokens count when their request ends: a steady stream of ends comes after some turns of the slots.
        world.wait_settled(2 * Settings().engine.max_requests, _DONE_S)
        first_ms = _wall_ms()
        time.sleep(seconds)  # the work of this time is the figure
        middle_ms = _wall_ms()
        open_loop.publish([Publisher(world.settings, "online")], plan)
        last_ms = _wall_ms()
        wait_for(lambda: _count(world, "online") == len(given), _DONE_S, "online answered")
        if _count(world, "offline") >= len(backlog):
            raise RuntimeError("offline ran out of work")
        beside = list(open_loop.served(world, given).values())
        offline_alone, offline_beside = _offline_tokens_per_s(world, first_ms, middle_ms, last_ms)
    alone_ms, beside_ms = [one.latency_ms for one in alone], [one.latency_ms for one in beside]
    return {
        "online.p99_beside_offline": p99(beside_ms) / p99(alone_ms),
        "online.offline_beside_online": offline_beside / offline_alone,
        "online.p50_beside_offline": statistics.median(beside_ms) / statistics.median(alone_ms),
        "online.engine_p99_beside_offline": p99([one.inference_ms for one in beside])
        / p99([one.inference_ms for one in alone]),
        "online.alone_p99_ms": p99(alone_ms),
        "online.alone_p50_ms": statistics.median(alone_ms),
        "online.offline_alone_tokens_per_s": offline_alone,
    }


def _count(world: World, class_name: str) -> int:
    return int(world.value("SELECT count(*) FROM results WHERE class = %s", class_name))


def _offline_tokens_per_s(world: World, first_ms: int, middle_ms: int, last_ms: int) -> tuple[float, float]:
    """In the time before ``middle_ms`` and in the time after it."""
    statement = (
        "SELECT coalesce(sum(output_tokens), 0)::bigint FROM results"
        " WHERE class = 'offline' AND settled_ms >= %s AND settled_ms < %s"
    )
    before = world.value(statement, first_ms, middle_ms) / (middle_ms - first_ms)
    return before * 1_000, world.value(statement, middle_ms, last_ms) / (last_ms - middle_ms) * 1_000


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000
