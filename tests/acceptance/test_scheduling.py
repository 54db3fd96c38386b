"""Slots, shares, deadlines and timeouts, seen from outside."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from contract.settings import Settings
from headrace.stack.processes import wait_for
from tests.acceptance.harness import World

SLOW_MS = 4_000


def small(settings: Settings, **engine: Any) -> Settings:
    """An engine of few slots: 4 for all, 2 more that only online may use."""
    replace = msgspec.structs.replace
    classes = dict(settings.classes)
    classes["online"] = replace(classes["online"], reserved_slots=2)
    classes["offline"] = replace(classes["offline"], floor_slots=1)
    return replace(
        settings,
        classes=classes,
        engine=replace(settings.engine, **({"max_requests": 6, "inference_min_s": 60} | engine)),
    )


@pytest.fixture
def few_slots(settings: Settings, tmp_path: Path) -> Iterator[World]:
    one = World(small(settings), tmp_path)
    yield one
    one.close()


def test_online_does_not_wait_behind_offline_that_fills_the_engine(few_slots: World) -> None:
    world = few_slots
    worker = world.worker().ready()
    world.publish(world.requests(12, prompt=f"FAULT:slow={SLOW_MS} x", prefix="bulk"), topic=world.topic("offline"))
    wait_for(
        lambda: 'headrace_engine_requests{class="offline"} 4.0' in worker.get("/metrics")[1], 20, "offline fills 4"
    )
    world.publish(world.requests(10, prefix="quick"))
    world.wait_settled(10)
    slowest_ms = world.value("SELECT max(latency_ms) FROM results WHERE id LIKE 'quick-%'")
    assert slowest_ms < SLOW_MS / 2
    assert world.value("SELECT count(*) FROM results WHERE id LIKE 'bulk-%'") == 0
    world.wait_settled(22)
    world.assert_sound(22)


def test_long_requests_leave_room_for_short_ones_which_pass(few_slots: World) -> None:
    world = few_slots
    worker = world.worker().ready()
    slow = world.requests(9, prompt=f"FAULT:slow={SLOW_MS} x", prefix="long", deadline_ms=60_000)
    world.publish(slow, topic=world.topic("online", "long"))
    wait_for(
        lambda: 'headrace_engine_requests{class="online"} 5.0' in worker.get("/metrics")[1], 20, "all but one slot"
    )
    world.publish(world.requests(10, prefix="short"))
    world.wait_settled(10)
    assert world.value("SELECT max(latency_ms) FROM results WHERE id LIKE 'short-%'") < SLOW_MS / 2
    world.wait_settled(19)


def test_deadline_that_passes_while_it_runs_frees_the_slot_and_charges_nobody(few_slots: World) -> None:
    world = few_slots
    world.worker().ready()
    world.publish(world.requests(1, prompt="FAULT:slow=60000 x", deadline_ms=1_500))
    world.wait_settled(1, timeout_s=10)
    assert world.query("SELECT status, error_code FROM results") == [("expired", "deadline_exceeded")]
    assert world.query("SELECT waste, charge_usd FROM attempts") == [("aborted", 0)]
    world.publish(world.requests(20, prefix="next"))
    world.wait_settled(21, timeout_s=20)


def test_stuck_attempt_is_cut_off_tried_once_more_and_then_failed(
    settings: Settings, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    world = World(small(settings, inference_min_s=1.0), tmp_path)
    request.addfinalizer(world.close)
    world.worker().ready()
    world.publish([*world.requests(1, prompt="FAULT:slow=60000 x"), *world.requests(5, prefix="fine")])
    world.wait_settled(6, timeout_s=20)
    assert world.query("SELECT status, error_code, attempt FROM results WHERE id = 'r-0'") == [
        ("failed", "inference_timeout", 2)
    ]
    assert world.value("SELECT count(*) FROM results WHERE status = 'ok'") == 5
    assert len(wait_for(lambda: world.read(world.settings.names.dead), 20, "a dead letter")) == 1


def test_prompt_larger_than_any_bucket_is_still_answered_where_it_landed(few_slots: World) -> None:
    world = few_slots
    world.worker().ready()
    world.publish(world.requests(1, prompt="word " * 400, max_tokens=300), topic=world.topic("online", "short"))
    world.wait_settled(1)
    assert world.query("SELECT status, bucket FROM results") == [("ok", "short")]


def test_waiting_request_is_told_that_it_expired_although_the_engine_stays_full(few_slots: World) -> None:
    world = few_slots
    worker = world.worker().ready()
    world.publish(world.requests(6, prompt="FAULT:slow=20000 x", prefix="busy", deadline_ms=60_000))
    wait_for(lambda: 'headrace_engine_requests{class="online"} 6.0' in worker.get("/metrics")[1], 20, "it is full")
    world.publish(world.requests(5, prefix="late", deadline_ms=1_000))
    world.wait_settled(5, timeout_s=10)
    assert world.query("SELECT DISTINCT status FROM results WHERE id LIKE 'late-%'") == [("expired",)]
    assert world.value("SELECT count(*) FROM attempts") == 0


def test_closed_batch_enters_together_and_the_next_one_waits_for_its_slowest(
    settings: Settings, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    closed = small(settings, closed_batches=True)
    online = closed.classes["online"]
    window = msgspec.structs.replace(online.window, max_requests=6, max_wait_ms=1_000)
    classes = closed.classes | {"online": msgspec.structs.replace(online, window=window)}
    # One partition, so that they are taken in the order in which they were published.
    topics = msgspec.structs.replace(closed.topics, partitions=1)
    world = World(msgspec.structs.replace(closed, classes=classes, topics=topics), tmp_path)
    request.addfinalizer(world.close)
    slow = world.requests(1, prompt=f"FAULT:slow={SLOW_MS} x", prefix="slow")
    following = world.requests(8, prompt="FAULT:slow=100 x", prefix="next")
    world.publish([*slow, *world.requests(5, prefix="beside"), *following])
    world.worker().ready()
    world.wait_settled(14)
    starts = dict(world.query("SELECT r.id, a.started_ms FROM results r JOIN attempts a USING (key)"))
    assert max(start for name, start in starts.items() if name.startswith("beside")) == starts["slow-0"]
    batches = sorted({start for name, start in starts.items() if name.startswith("next")})
    assert batches[0] >= starts["slow-0"] + SLOW_MS
    assert len(batches) == 2, "six together, then two"
