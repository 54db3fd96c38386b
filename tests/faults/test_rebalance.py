"""Field cases B08 and B09: batches longer than the poll interval, and windows cut by a rebalance."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from contract.settings import Settings
from headrace.stack.processes import wait_for
from tests.acceptance.harness import WorkerProcess, World
from tests.faults.site import is_quiet

pytestmark = pytest.mark.faults
SLOTS = 8


def _events(worker: WorkerProcess, name: str) -> list[dict[str, Any]]:
    """What its intakes of class ``online`` logged."""
    return [event for event in worker.log_events() if event["event"] == name and event["class_name"] == "online"]


def test_b08_batch_longer_than_the_poll_interval_does_not_lose_the_group(
    settings: Settings, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    replace = msgspec.structs.replace
    kafka = replace(settings.kafka, consumer={"max.poll.interval.ms": settings.kafka.session_timeout_ms})
    engine = replace(settings.engine, max_requests=SLOTS)
    classes = settings.classes | {"online": replace(settings.classes["online"], reserved_slots=0)}
    world = World(replace(settings, kafka=kafka, engine=engine, classes=classes), tmp_path)
    request.addfinalizer(world.close)
    workers = [world.worker(), world.worker()]
    for one in workers:
        one.ready()
    wait_for(lambda: is_quiet(world, 2), 60, "both have their share")
    topic = world.topic()
    joined = [len(_events(one, "intake.assigned")) for one in workers]
    # Each takes longer than the longest silence that the broker forgives.
    batch = SLOTS * len(workers) // settings.topics.partitions
    total = batch * settings.topics.partitions
    for partition in range(settings.topics.partitions):
        slow = world.requests(batch, prompt="FAULT:slow=7000 x", prefix=f"p{partition}", deadline_ms=600_000)
        world.publish(slow, partition=partition)
    world.wait_settled(total, timeout_s=90)
    wait_for(lambda: world.lag() == 0, 30, "all committed")
    assert sum(world.committed(topic).values()) == total
    assert world.value("SELECT count(*) FROM attempts") == total  # none was run twice
    assert [len(_events(one, "intake.assigned")) for one in workers] == joined  # no rebalance besides the joins
    assert not any(_events(one, "intake.lost") for one in workers)
    world.assert_sound(total)


def test_b09_worker_that_joins_into_an_open_window_makes_at_most_that_window_run_twice(
    settings: Settings, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    replace = msgspec.structs.replace
    window = replace(settings.classes["online"].window, max_requests=100, max_wait_ms=10_000)
    classes = settings.classes | {"online": replace(settings.classes["online"], window=window, reserved_slots=0)}
    # A full engine: nothing closes the window early.
    engine = replace(settings.engine, max_requests=SLOTS)
    world = World(replace(settings, classes=classes, engine=engine), tmp_path)
    request.addfinalizer(world.close)
    first = world.worker().ready()
    world.publish(world.requests(SLOTS, prompt="FAULT:slow=4000 x", prefix="busy", deadline_ms=600_000))
    busy = f'headrace_engine_requests{{class="online"}} {SLOTS}.0'
    wait_for(lambda: busy in first.get("/metrics")[1], 20, "the engine is busy")
    second = world.worker()
    total, deadline = SLOTS, time.monotonic() + 60
    while not is_quiet(world, 2):  # windows fill all the while that it joins
        assert time.monotonic() < deadline, "the second worker never got its share"
        if total - world.settled() < 500:  # enough to fill windows, not more than can be worked off
            world.publish(world.requests(20, prompt="FAULT:slow=100 x", prefix=f"w{total}", deadline_ms=600_000))
            total += 20
    world.publish(world.requests(100, prompt="FAULT:slow=100 x", prefix="both", deadline_ms=600_000))
    total += 100
    second.ready()
    world.wait_settled(total)
    world.wait_results(total)
    wait_for(lambda: world.lag() == 0, 30, "all committed")
    assert world.value("SELECT count(DISTINCT partition) FROM results JOIN workers ON epoch = worker_epoch"
                       " WHERE name = %s", second.name) >= 1  # fmt: skip
    assert world.value("SELECT count(*) FROM attempts WHERE waste = 'duplicate'") <= window.max_requests
    world.assert_sound(total)
    for one in (first, second):
        assert one.terminate() == 0
    assert world.reconcile() == []
