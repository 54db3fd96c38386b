"""Faults of workers: killed, frozen beyond their death, coming and going, and two with the same request."""

from __future__ import annotations

import functools
import random
import signal
import time

from gpu_workers.worker import EXIT_FENCED
from headrace.stack.processes import wait_for
from tests.faults.row import Row, account
from tests.faults.site import PARTITIONS, SESSION_S, Load, Site, hold_for, is_quiet, requests, wait_answered

_ROUND_REQUESTS = 500
_BURIED = "SELECT count(*) FROM workers WHERE name = %s AND closed_reason = 'dead'"


def killed(site: Site, rng: random.Random, rounds: int) -> Row:
    """kill -9 of one of two workers at a random moment under load; the online deadline of 30 s survives it."""
    with site.world() as world:
        workers = [world.worker(), world.worker()]
        for one in workers:
            one.ready()
        recoveries = []
        with Load(world, rng, slow_ms=300, deadline_ms=30_000) as load:
            for _ in range(rounds):
                workers = [one if one.child.running else world.worker().ready() for one in workers]
                hold_for(rng.uniform(0.5, 3.0))  # at first the group is still making room for the one that joined
                rng.choice(workers).child.kill()
                started = time.monotonic()
                wait_answered(world, load)
                recoveries.append(time.monotonic() - started)
        world.wait_settled(len(load.ids), timeout_s=120)
        assert world.query("SELECT id, status FROM results WHERE status <> 'ok'") == []
        return account("workers.killed", world, load.ids, recoveries)


def zombie(site: Site, rng: random.Random, rounds: int) -> Row:
    """SIGSTOP past session and burial, then SIGCONT: it finds itself fenced and ends with a status of its own."""
    with site.world(worker={"dead_after_s": SESSION_S + 2}) as world:
        recoveries, ids = [], list[str]()
        other = world.worker()
        for number in range(rounds):
            frozen = world.worker().ready()
            other.ready()
            wait_for(lambda: is_quiet(world, 2), 60, "each has its share")
            batch = requests(rng, _ROUND_REQUESTS, slow_ms=2_000, prefix=f"z{number}", deadline_ms=600_000)
            world.publish(batch)
            ids += [request["id"] for request in batch]
            hold_for(rng.uniform(0.5, 1.5))
            frozen.child.send(signal.SIGSTOP)
            started = time.monotonic()
            world.wait_settled(len(ids), timeout_s=120)
            recoveries.append(time.monotonic() - started)
            wait_for(functools.partial(world.value, _BURIED, frozen.name), 60, "it is declared dead")
            frozen.child.send(signal.SIGCONT)
            assert frozen.child.wait(60) == EXIT_FENCED, frozen.child.tail()
        late = world.value(
            "SELECT count(*) FROM settled JOIN workers ON epoch = winner_epoch"
            " WHERE closed_reason = 'dead' AND settled_at > closed_at"
        )
        assert late == 0, "a dead epoch settled something"
        return account("workers.zombie", world, ids, recoveries)


def same_id(site: Site, rng: random.Random, rounds: int) -> Row:
    """Each id on every partition at once, and so in the hands of two workers. A round is an id."""
    with site.world() as world:
        for one in (world.worker(), world.worker()):
            one.ready()
        wait_for(lambda: is_quiet(world, 2), 60, "each has its share")
        batch = requests(rng, rounds, slow_ms=200, prefix="same")
        for partition in range(PARTITIONS):
            world.publish(batch, partition=partition)
        world.wait_settled(rounds, timeout_s=120)
        row = account("workers.same_id", world, [request["id"] for request in batch], [], rounds=rounds)
        assert world.value("SELECT count(*) FROM attempts WHERE waste = 'duplicate'") > 0, "no two ever raced"
        return row
