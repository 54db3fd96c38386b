"""Engines that die or go deaf under load; and requests that kill them."""

from __future__ import annotations

import dataclasses
import random
import time

from tests.acceptance import test_poison
from tests.faults.row import Row, account
from tests.faults.site import Site, requests

_ROUND_REQUESTS = 300
_PROBE_S = 3.0
_GIVEN_UP_AFTER = 3


def simulated_died(site: Site, rng: random.Random, rounds: int) -> Row:
    """The engine dies once with a request in it and is started anew."""
    return _simulated("engines.simulated_died", "die-once", 1, site, rng, rounds)


def simulated_hung(site: Site, rng: random.Random, rounds: int) -> Row:
    """A request turns each core deaf, three a round until it is given up; a probe tells (2 s + 3 s here)."""
    return _simulated("engines.simulated_hung", "hang", _GIVEN_UP_AFTER, site, rng, rounds)


def _simulated(name: str, word: str, deaths: int, site: Site, rng: random.Random, rounds: int) -> Row:
    """``deaths`` engines a round; who caused ``_GIVEN_UP_AFTER`` of them fails, and nobody else."""
    with site.world(engine={"probe_timeout_s": _PROBE_S}) as world:
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
            assert rows[-1].sound, rows[-1]
    return dataclasses.replace(
        rows[0],
        rounds=rounds,
        requests=sum(row.requests for row in rows),
        wasted_gpu_s=round(sum(row.wasted_gpu_s for row in rows), 2),
    )
