"""What an online request waits longer for when it goes through broker, worker and database, and not straight to vLLM.

Twice. By the same few callers, each of whom asks again when it has its answer: the target's figure. And as strangers
ask, at the same times in both, at half of the capacity that the program beside it finds first, at 64 at once. Both
have answered a few hundred before. The client measures from asking to having the answer.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from benchmarks import asks, real
from benchmarks.asks import Ask
from benchmarks.figure import Goal
from benchmarks.site import Site
from contract.settings import Settings
from producers.client import AsyncClient
from tests.acceptance.harness import World

REQUESTS = 600
WARM_UP = 400
PROBE = 400
"""Requests by which capacity is found."""
SHARE = 0.5
AT_ONCE = 16
"""Callers: about as many as are in the engine at half of its capacity."""
_ANSWER_S = 60.0

P99_VS_DIRECT = (
    Goal(
        "online.p99_vs_direct",
        "P99 from asking to answer, 16 callers: headrace ÷ straight into AsyncLLM",
        "×",
        "≤ 1.15",
    ),
    Goal("online.p50_vs_direct", "the same, P50", "×"),
    Goal("online.direct_p99_ms", "P99 straight into AsyncLLM", "ms"),
    Goal("online.direct_p50_ms", "P50 straight into AsyncLLM", "ms"),
    Goal("online.engine_p99_vs_direct", "of it, in the engine: P99 ÷ P99 straight into AsyncLLM", "×"),
    Goal("online.engine_p50_vs_direct", "the same, P50", "×"),
    Goal("online.in_ms", "P50 of the way in: asked, appended, pulled, claimed, given to the engine", "ms"),
    Goal("online.out_ms", "P50 of the way out: committed, published, in the client's hands", "ms"),
    Goal("online.open_p99_vs_direct", "P99, arrivals at half of the engine's capacity: headrace ÷ AsyncLLM", "×"),
    Goal("online.open_p50_vs_direct", "the same, P50", "×"),
    Goal("online.open_per_s", "arrivals a second: half of what the engine can do", "/s"),
)


def p99_vs_direct(site: Site) -> dict[str, float]:
    """600 short online requests of 16 callers, and 600 more at half of capacity, through headrace and not."""
    given = {
        "warm_up": asks.make(asks.ONLINE, site.scaled(WARM_UP), "warm-up"),
        "few": asks.make(asks.ONLINE, site.scaled(REQUESTS), "few"),
        "open": asks.make(asks.ONLINE, site.scaled(REQUESTS), "open"),
    }
    sections = real.sections()
    del sections["worker"]  # as shipped: all classes, some slots kept for online
    with site.world(**sections) as world:
        direct = straight(site, world.settings, given)
        site.calm()
        worker = world.worker().ready(real.READY_S)
        total_ms = asyncio.run(_ask(world.settings, given, direct["per_s"]))
        real.check(world, [ask for chosen in given.values() for ask in chosen])
        if worker.terminate() or world.reconcile():
            raise RuntimeError(f"the worker's books do not add up\n{worker.child.tail()}")
        parts = _parts(world, total_ms["few"])
    few_ms, open_ms = list(total_ms["few"].values()), list(total_ms["open"].values())
    direct_ms, direct_open_ms = direct["few_ms"], direct["open_ms"]
    engine_ms = [inside for _, inside, _ in parts]
    return {
        "online.p99_vs_direct": p99(few_ms) / p99(direct_ms),
        "online.p50_vs_direct": statistics.median(few_ms) / statistics.median(direct_ms),
        "online.direct_p99_ms": p99(direct_ms),
        "online.direct_p50_ms": statistics.median(direct_ms),
        "online.engine_p99_vs_direct": p99(engine_ms) / p99(direct_ms),
        "online.engine_p50_vs_direct": statistics.median(engine_ms) / statistics.median(direct_ms),
        "online.in_ms": statistics.median(way_in for way_in, _, _ in parts),
        "online.out_ms": statistics.median(way_out for _, _, way_out in parts),
        "online.open_p99_vs_direct": p99(open_ms) / p99(direct_open_ms),
        "online.open_p50_vs_direct": statistics.median(open_ms) / statistics.median(direct_open_ms),
        "online.open_per_s": direct["per_s"],
    }


def straight(site: Site, settings: Settings, given: Mapping[str, Sequence[Ask]]) -> dict[str, Any]:
    """``peers/direct.py``: the rate it chose, and each request's latency both ways."""
    folder = site.folder / f"direct-{site.run}"
    sets = {**given, "probe": asks.make(asks.ONLINE, site.scaled(PROBE), "probe")}
    files = {
        name: str(asks.write(folder / f"{name}.jsonl", (one.prompt() for one in chosen)))
        for name, chosen in sets.items()
    }
    return real.outcome(
        "direct",
        folder,
        {
            **files,
            "arguments": real.arguments(settings.engine),
            "at_once": AT_ONCE,
            "share": SHARE,
            "gaps_s": _gaps_s(len(given["open"])),
        },
    )


def _gaps_s(count: int) -> list[float]:
    """Times between arrivals at one a second; divided by the rate where they are used."""
    gaps_s = asks.gaps_s(1.0, "arrivals")
    return [next(gaps_s) for _ in range(count)]


async def _ask(settings: Settings, given: Mapping[str, Sequence[Ask]], per_s: float) -> dict[str, dict[str, float]]:
    """Milliseconds from asking to having the answer, by set and id."""
    settings = msgspec.structs.replace(settings, client=msgspec.structs.replace(settings.client, source=asks.SOURCE))
    async with AsyncClient(settings) as client:
        await _few_at_a_time(client, given["warm_up"])
        few_ms = await _few_at_a_time(client, given["few"])
        open_ms: dict[str, float] = {}
        async with asyncio.TaskGroup() as tasks:
            due_s = time.monotonic()
            for ask, gap_s in zip(given["open"], _gaps_s(len(given["open"])), strict=True):
                due_s += gap_s / per_s
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                tasks.create_task(_ask_one(client, ask, open_ms))
    return {"few": few_ms, "open": open_ms}


async def _few_at_a_time(client: AsyncClient, given: Sequence[Ask]) -> dict[str, float]:
    left = iter(given)
    total_ms: dict[str, float] = {}

    async def caller() -> None:
        for ask in left:
            await _ask_one(client, ask, total_ms)

    await asyncio.gather(*(caller() for _ in range(AT_ONCE)))
    return total_ms


async def _ask_one(client: AsyncClient, ask: Ask, total_ms: dict[str, float]) -> None:
    asked_s = time.monotonic()
    ticket = await client.submit(ask.prompt(), class_name="online")
    result = await client.result(ticket, _ANSWER_S)
    if result.status != "ok":
        raise RuntimeError(f"{ask.id} ended as {result.status}")
    total_ms[ask.id] = (time.monotonic() - asked_s) * 1e3


def _parts(world: World, total_ms: dict[str, float]) -> list[tuple[float, float, float]]:
    """Of each request, ms: before the engine, in it, after it; together what its client saw.

    The row knows the first two from the broker's own time on; what the client saw more is the way out, and the way
    of the request to the broker, which cannot be told apart without trusting two clocks.
    """
    rows = world.query("SELECT id, queue_ms, inference_ms FROM results")
    return [
        (queue_ms, inference_ms, total_ms[name] - queue_ms - inference_ms)
        for name, queue_ms, inference_ms in rows
        if name in total_ms
    ]


def p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]
