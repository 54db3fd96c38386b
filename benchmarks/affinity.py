"""What affinity is worth to the prefix cache: real vLLM in two workers, prefixes that do not all fit into one cache.

Only the share of cached prompt tokens is a figure, and speed does not enter it. That both engines compete for
two cores does no harm here.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import msgspec

from benchmarks import real
from benchmarks.figure import Goal
from benchmarks.open_loop import Publisher
from benchmarks.site import Site
from contract.settings import Settings
from headrace.stack.processes import wait_for
from tests.acceptance.harness import World
from tests.faults.site import is_quiet

PREFIXES = 50
BLOCK_TOKENS = 128
"""vLLM's on the CPU."""
PREFIX_TOKENS = 4 * BLOCK_TOKENS
OWN_TOKENS = 32
CACHE_BLOCKS = 128
"""Of a worker: 32 prefixes, less what the requests in the engine hold for themselves. All 50 need 200."""
SLOTS = 8
REQUESTS = 1_000
_WARMING = 0.2
"""This share of the requests fills the caches and is not counted."""
_TOKENS = range(7, 283)
"""Ordinary tokens of the tiny model."""
_SPREADS: Mapping[str, int | None] = {"off": None, "spread_1": 1, "spread_2": 2}
_QUIET_S = 60.0
_DONE_S = 240.0

AFFINITY = (
    Goal("prefix.affinity", "cached share of prompt tokens with affinity, each prefix in one partition", "%", "report"),
    Goal("prefix.affinity_spread_2", "the same, each prefix in two partitions (the default)", "%", "report"),
    Goal("prefix.affinity_off", "the same without affinity", "%", "report"),
    Goal("prefix.busier_worker", "the busier worker's share of requests with affinity, one partition", "%"),
    Goal("prefix.busier_worker_off", "the same without affinity", "%"),
)


def affinity(site: Site) -> dict[str, float]:
    """50 prefixes of 512 tokens, two workers whose caches hold 32 of them each: cached share of prompt tokens."""
    sections = real.sections(max_requests=SLOTS, vllm={"num_gpu_blocks_override": CACHE_BLOCKS + 1})
    classes = msgspec.to_builtins(Settings().classes)
    classes["online"]["reserved_slots"] = 0
    worker = {"classes": ["online"]}
    with site.world(**(sections | {"worker": worker, "classes": classes, "topics": {"partitions": 12}})) as world:
        workers = [world.worker() for _ in range(2)]
        for one in workers:
            one.ready(real.READY_S)
        wait_for(lambda: is_quiet(world, 2), _QUIET_S, "each worker has its partitions")
        cached, busier = {}, {}
        for name, spread in _SPREADS.items():
            cached[name], busier[name] = _share(site, world, name, spread)
        for one in workers:
            if one.terminate():
                raise RuntimeError(f"a worker failed\n{one.child.tail()}")
        if world.reconcile():
            raise RuntimeError("the books do not add up")
    return {
        "prefix.affinity": cached["spread_1"],
        "prefix.affinity_spread_2": cached["spread_2"],
        "prefix.affinity_off": cached["off"],
        "prefix.busier_worker": busier["spread_1"],
        "prefix.busier_worker_off": busier["off"],
    }


def _share(site: Site, world: World, name: str, spread: int | None) -> tuple[float, float]:
    """Prefixes that no worker has met: % of prompt tokens that were cached, % of requests in the busier worker."""
    settings = world.settings
    if spread is not None:
        client = msgspec.structs.replace(settings.client, affinity_spread=spread)
        settings = msgspec.structs.replace(settings, client=client)
    publisher = Publisher(settings, "online")
    requests = _requests(site.scaled(REQUESTS), f"{name}-{site.run}", with_affinity=spread is not None)
    for request in requests:
        publisher.send(request)
    publisher.finish()
    ids = [request["id"] for request in requests]
    wait_for(lambda: _answered(world, ids) == len(ids), _DONE_S, f"{len(ids)} answered")
    rows = world.query(
        "SELECT sum(cached_tokens)::bigint, sum(prompt_tokens)::bigint, count(*) FROM results"
        " WHERE status = 'ok' AND id = ANY(%s) GROUP BY worker",
        ids[int(len(ids) * _WARMING) :],
    )
    cached, prompt, counts = ([row[place] for row in rows] for place in range(3))
    return 100 * sum(cached) / sum(prompt), 100 * max(counts) / sum(counts)


def _answered(world: World, ids: list[str]) -> int:
    return int(world.value("SELECT count(*) FROM results WHERE status = 'ok' AND id = ANY(%s)", ids))


def _requests(count: int, seed: str, *, with_affinity: bool) -> list[dict[str, Any]]:
    """Each begins with one of the prefixes, any with the same chance, and ends with tokens of its own."""
    rng = random.Random(seed)
    prefixes = [rng.choices(_TOKENS, k=PREFIX_TOKENS) for _ in range(PREFIXES)]
    requests = []
    for number in range(count):
        which = rng.randrange(PREFIXES)
        request = {
            "id": f"{seed}-{number}",
            "source": "bench",
            "prompt_token_ids": prefixes[which] + rng.choices(_TOKENS, k=OWN_TOKENS),
            "max_tokens": 4,
            "ignore_eos": True,
            "temperature": 0,
            "deadline_ms": 600_000,
        }
        requests.append(request | ({"affinity": f"{seed}/{which}"} if with_affinity else {}))
    return requests
