"""Day partitions: made by any number of processes at once, dropped by retention."""

from __future__ import annotations

import datetime as dt
import threading

import psycopg

from contract.settings import Postgres
from contract.statuses import Status
from storage import partitions
from storage.partitions import name_of
from storage.rows import Claim
from storage.store import Store
from tests.integration.storage.build import TOPIC, Call, Worker, execute, now_ms, one, rows_of

DAY_MS = 86_400_000
PARTITIONS = "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = ANY ('{results,attempts}'::regclass[])"


def names(store: Store) -> set[str]:
    return {name for (name,) in rows_of(store, f"{PARTITIONS} AND inhrelid::regclass::text !~ 'idx|pkey'")}


def days_from_today(count: int) -> list[dt.date]:
    today = dt.datetime.now(dt.UTC).date()
    return [today + dt.timedelta(days=number) for number in range(count)]


def test_partitions_are_made_ahead_and_twice_is_harmless(store: Store) -> None:
    store.make_partitions()
    store.make_partitions()
    days = days_from_today(store.postgres.partitions_ahead_days + 1)
    assert names(store) == {name_of(parent, day) for parent in ("results", "attempts") for day in days}


def test_eight_makers_of_the_same_days_at_once_find_no_error_and_no_deadlock(store: Store) -> None:
    reasons: list[str] = []
    days = [dt.date(2030, 1, 1) + dt.timedelta(days=number) for number in range(20)]
    stores = [Store(store.postgres, on_retry=reasons.append) for _ in range(8)]
    start = threading.Barrier(8)

    def make(own: Store, wanted: list[dt.date]) -> None:
        own.ping(5)
        start.wait()
        partitions.make(own.database, wanted)

    calls = [
        Call(lambda own=own, number=number: make(own, days if number % 2 else days[::-1]))  # type: ignore[misc]
        for number, own in enumerate(stores)
    ]
    for call in calls:
        call.result()
    assert reasons == []
    assert names(store) == {name_of(parent, day) for parent in ("results", "attempts") for day in days}
    for own in stores:
        own.close()


def test_eight_writers_meet_missing_days_at_once_and_all_settle(store: Store) -> None:
    start = threading.Barrier(8)
    base = now_ms()

    def write(number: int) -> list[bool]:
        own = Store(store.postgres)
        worker = Worker(own, f"w{number}")
        start.wait()
        won = []
        for day in range(6):
            # Each in another order, so that two make different days first.
            appended_ms = base - ((day + number) % 6) * DAY_MS
            batch = [worker.outcome(f"{number}-{day}-{i}", appended_ms=appended_ms) for i in range(5)]
            won += [verdict.won for verdict in own.settle(batch)]
        own.close()
        return won

    calls = [Call(lambda number=number: write(number)) for number in range(8)]  # type: ignore[misc]
    assert all(all(call.result()) for call in calls)
    assert one(store, "SELECT count(*) FROM results") == 8 * 6 * 5


def test_making_a_day_waits_for_no_writer(store: Store) -> None:
    worker = Worker(store)
    store.settle([worker.outcome("a")])
    with psycopg.connect(store.postgres.url) as writer:
        writer.execute("UPDATE results SET altered = true")
        quick = Store(Postgres(url=store.postgres.url, statement_timeout_s=3))
        partitions.make(quick.database, [dt.date(2031, 5, 5)])
        quick.close()
        writer.rollback()
    assert name_of("results", dt.date(2031, 5, 5)) in names(store)


def test_old_days_keys_workers_and_claims_go_and_nothing_else(store: Store) -> None:
    kept, old, ancient = now_ms(), now_ms() - 10 * DAY_MS, now_ms() - 100 * DAY_MS
    worker, gone = Worker(store), Worker(store, "gone", started_ms=ancient)
    store.settle(
        [
            worker.outcome("new", appended_ms=kept),
            worker.outcome("old", appended_ms=old),
            gone.outcome("ancient", appended_ms=ancient, attempts=[gone.attempt(ended_ms=ancient)]),
        ]
    )
    gone.beat(busy_ns=5)
    for one_worker in (worker, gone):
        store.look_up(one_worker.epoch, [Claim(TOPIC, 0, 1, 2)], [])
    execute(
        store,
        "UPDATE workers SET closed_at = now() - interval '99 days', closed_reason = 'dead' WHERE epoch = %s",
        gone.epoch,
    )
    dropped = store.drop_old()
    ancient_day = dt.datetime.fromtimestamp(ancient / 1000, dt.UTC).date()
    assert set(dropped) == {name_of(parent, ancient_day) for parent in ("results", "attempts")}
    assert rows_of(store, "SELECT id FROM results ORDER BY id") == [("new",), ("old",)]
    known = store.look_up(worker.epoch, [], [worker.outcome(id).result.key for id in ("new", "old", "ancient")])
    assert {each.status for each in known.settled.values()} == {Status.OK}
    assert list(known.settled) == [worker.outcome("new").result.key], "keys older than the horizon are forgotten"
    assert rows_of(store, "SELECT epoch FROM workers") == [(worker.epoch,)]
    assert rows_of(store, "SELECT DISTINCT worker_epoch FROM claims") == [(worker.epoch,)]
    assert rows_of(store, "SELECT * FROM worker_time") == []
    assert store.drop_old() == []


def test_retention_beside_writers_breaks_neither(store: Store) -> None:
    worker = Worker(store)
    stop = threading.Event()

    def write() -> int:
        count = 0
        while not stop.is_set():
            # Records older than retention come in as fast as it drops their day.
            batch = [worker.outcome(f"{count}-{place}", appended_ms=now_ms() - 95 * DAY_MS) for place in range(5)]
            assert all(verdict.won and verdict.result.status is Status.OK for verdict in store.settle(batch))
            count += 1
        return count

    writing = Call(write)
    dropping = Store(store.postgres)
    dropped = [name for _ in range(20) for name in dropping.drop_old()]
    stop.set()
    assert writing.result() > 5
    assert dropped
    dropping.close()
