"""Workers that come and go all the time, in each of the ways a worker can leave."""

from __future__ import annotations

import random
import signal
import time

from headrace.stack.processes import wait_for
from tests.acceptance.harness import WorkerProcess, World
from tests.faults.row import Row, account
from tests.faults.site import SESSION_S, Load, Site, hold_for, is_quiet

CHANGE_EVERY_S = 5.0
QUIET_S = 30.0
MOST_TWICE = 0.05
_LONG_RUN = 12
_WAYS = (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP)


def classic(site: Site, rng: random.Random, rounds: int) -> Row:
    """6 workers, every 5 s one leaves (TERM, KILL, STOP 20 s) and one joins, cooperative-sticky; recovery: quiet.

    A round is one leave and one join.
    """
    return _churn("classic", site, rng, rounds)


def consumer(site: Site, rng: random.Random, rounds: int) -> Row:
    """The same on the newer group protocol (KIP-848), session timeout and heartbeat set at the broker."""
    return _churn("consumer", site, rng, rounds)


def _churn(protocol: str, site: Site, rng: random.Random, rounds: int) -> Row:
    stopped_s = max(site.outage_s, SESSION_S + 2)
    kafka = {"group_protocol": protocol}
    with site.world(kafka=kafka, topics={"partitions": 2 * site.crew}) as world:
        members = [world.worker() for _ in range(site.crew)]
        for one in members:
            one.ready()
        frozen: list[tuple[float, WorkerProcess]] = []
        with Load(world, rng, slow_ms=300) as load:
            for number in range(rounds):
                leaving = rng.choice(wait_for(lambda: _serving(members), 120, "somebody serves"))
                members.remove(leaving)
                way = _WAYS[number % len(_WAYS)]
                leaving.child.send(way)
                if way is signal.SIGSTOP:
                    frozen.append((time.monotonic() + stopped_s, leaving))
                members.append(world.worker())
                hold_for(CHANGE_EVERY_S)
                frozen = _thawed(frozen)
            changed_s = time.monotonic()
            wait_for(lambda: is_quiet(world, _awake(world, frozen)), 4 * QUIET_S, "the groups are quiet")
            quiet_s = time.monotonic() - changed_s
        while frozen := _thawed(frozen):
            hold_for(0.2)
        world.wait_settled(len(load.ids), timeout_s=120)
        assert world.query("SELECT id, status FROM results WHERE status <> 'ok'") == []
        row = account(f"membership.{protocol}", world, load.ids, [quiet_s], rounds=rounds)
        twice = world.value("SELECT count(*) FROM attempts WHERE waste = 'duplicate'")
        if rounds >= _LONG_RUN:  # in a short one what a single thawed worker had in hand is more
            assert twice < MOST_TWICE * len(load.ids), f"{twice} of {len(load.ids)} computed twice"
        return row


def _serving(members: list[WorkerProcess]) -> list[WorkerProcess]:
    """Who has joined: one that still starts cannot leave."""
    return [one for one in members if one.get("/readyz")[0] == 200]


def _awake(world: World, frozen: list[tuple[float, WorkerProcess]]) -> int:
    """Workers that are there or will be. One that thaws before it is declared dead is a worker again."""
    asleep = [one for _, one in frozen]
    return sum(one.child.running and one not in asleep for one in world.workers)


def _thawed(frozen: list[tuple[float, WorkerProcess]]) -> list[tuple[float, WorkerProcess]]:
    """Lets go on those whose time has come; the others."""
    now = time.monotonic()
    for due_s, one in frozen:
        if due_s <= now:
            one.child.send(signal.SIGCONT)
    return [(due_s, one) for due_s, one in frozen if due_s > now]
