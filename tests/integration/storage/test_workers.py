"""A worker's life in the database: epochs, heartbeats, fences, and who closes the books of the dead."""

from __future__ import annotations

import psycopg
import pytest

from contract.errors import Fenced
from contract.settings import Postgres
from contract.statuses import Status, Waste
from storage import statements
from storage.reconcile import reconcile
from storage.rows import Claim
from storage.store import Store
from tests.integration.storage.build import TOPIC, Call, Worker, execute, one, rows_of, wait_until

TOLD = "SELECT provisioned_ns, lost_ns, closed_reason FROM workers WHERE epoch = %s"


def test_each_start_of_a_worker_is_an_epoch_of_its_own(store: Store) -> None:
    assert Worker(store, "same").epoch < Worker(store, "same").epoch


def test_heartbeats_add_up_and_provisioned_time_never_falls(store: Store) -> None:
    worker = Worker(store)
    worker.beat(starting_ns=10)
    worker.beat(idle_ns=5, busy_ns=6, rounding_ns=6)
    store.beat(worker.time_row(), 3)
    assert rows_of(store, TOLD, worker.epoch) == [(21, 0, None)]
    assert reconcile(store) == []


def test_a_closed_epoch_is_fenced_from_heartbeat_close_and_settlement(store: Store) -> None:
    worker = Worker(store)
    worker.fall_silent()
    store.reap(30)
    for call in (worker.beat, worker.close, lambda: store.settle([worker.outcome("a")])):
        with pytest.raises(Fenced):
            call()
    assert one(store, "SELECT count(*) FROM worker_time") == 0
    with pytest.raises(Fenced):
        store.beat(Worker(store).time_row().__class__(worker_epoch=999_999, seq=1, at_ms=1), 1)


def test_closing_twice_is_harmless_and_gives_claims_back(store: Store) -> None:
    worker = Worker(store)
    store.look_up(worker.epoch, [Claim(TOPIC, 0, 1, 2)], [])
    row = worker.time_row(idle_ns=4)
    store.close_worker(row, 4)
    store.close_worker(row, 4)
    assert rows_of(store, TOLD, worker.epoch) == [(4, 0, "stopped")]
    assert one(store, "SELECT count(*) FROM claims") == 0
    assert store.reap(0) == []
    assert reconcile(store) == []


def test_only_the_silent_are_reaped_by_the_servers_clock(store: Store) -> None:
    silent, beating = Worker(store), Worker(store)
    silent.fall_silent(20)
    beating.fall_silent(10)
    assert store.reap(15) == [silent.epoch]
    assert store.reap(15) == []
    beating.beat(idle_ns=1)


def test_busy_time_without_an_attempt_is_a_crash_line(store: Store) -> None:
    worker = Worker(store)
    store.settle([worker.outcome("a", attempts=[worker.attempt(allocated_ns=40)])])
    worker.beat(starting_ns=100, busy_ns=100, rounding_ns=1)
    worker.fall_silent()
    store.reap(30)
    crash = rows_of(store, "SELECT seq, allocated_ns, charge_usd, key, pool FROM attempts WHERE waste = 'crash'")
    assert crash == [(-1, 59, 0, None, "default")]
    assert rows_of(store, TOLD, worker.epoch) == [(200, 0, "dead")]
    assert reconcile(store) == []


def test_attempts_settled_after_the_last_heartbeat_prove_that_the_time_was_there(store: Store) -> None:
    worker = Worker(store)
    worker.beat(starting_ns=100, busy_ns=10)
    store.settle([worker.outcome("a", attempts=[worker.attempt(allocated_ns=700)])])
    worker.fall_silent()
    store.reap(30)
    assert rows_of(store, "SELECT seq, busy_ns FROM worker_time ORDER BY seq") == [(1, 10), (2, 690)]
    assert rows_of(store, TOLD, worker.epoch) == [(800, 0, "dead")]
    assert reconcile(store) == []


def test_provisioned_time_that_no_row_tells_is_lost(store: Store) -> None:
    worker = Worker(store)
    worker.beat(idle_ns=100)
    execute(store, "UPDATE workers SET provisioned_ns = 150 WHERE epoch = %s", worker.epoch)
    assert [finding.check for finding in reconcile(store)] == ["provisioned_is_all_states"]
    worker.fall_silent()
    store.reap(30)
    assert rows_of(store, TOLD, worker.epoch) == [(150, 50, "dead")]
    assert reconcile(store) == []


def test_a_worker_that_died_before_its_first_heartbeat_is_closed_too(store: Store) -> None:
    worker = Worker(store, started_ms=1_600_000_000_000)
    store.settle([worker.outcome("a", Status.SHED)])
    worker.fall_silent()
    assert store.reap(30) == [worker.epoch]
    assert reconcile(store) == []


def test_many_reapers_at_once_bury_each_worker_once(store: Store) -> None:
    workers = [Worker(store) for _ in range(20)]
    for worker in workers:
        worker.beat(busy_ns=9)
        worker.fall_silent()
    calls = [Call(lambda: store.reap(30)) for _ in range(6)]
    reaped = [epoch for call in calls for epoch in call.result()]
    assert sorted(reaped) == [worker.epoch for worker in workers]
    assert one(store, "SELECT count(*) FROM attempts WHERE waste = 'crash'") == 20


def test_attempts_of_nobody_are_booked_with_the_heartbeat(store: Store) -> None:
    worker = Worker(store)
    orphans = [worker.attempt(allocated_ns=30), worker.attempt(allocated_ns=12, waste=Waste.WARM_UP)]
    worker.beat(orphans, busy_ns=42)
    worker.close(idle_ns=1)
    lines = rows_of(store, "SELECT waste, allocated_ns, key, charge_usd FROM attempts ORDER BY seq")
    assert lines == [("aborted", 30, None, 0), ("warm_up", 12, None, 0)]
    assert reconcile(store) == []


def test_a_worker_whose_settlement_is_under_way_is_not_buried_and_its_heart_beats_on(store: Store) -> None:
    worker = Worker(store)
    with psycopg.connect(store.postgres.url) as settling:
        settling.execute(str(statements.LOCK_OPEN_WORKERS).replace(":epochs", "%s").encode(), [[worker.epoch]])
        worker.fall_silent()
        assert store.reap(30) == []
        quick = Store(Postgres(url=store.postgres.url, statement_timeout_s=2))
        quick.beat(worker.time_row(idle_ns=1), 1)
        quick.close()
        worker.fall_silent()
        settling.rollback()
    assert store.reap(30) == [worker.epoch]


def test_a_settlement_that_waits_for_the_reaper_is_fenced_when_it_is_done(store: Store) -> None:
    worker = Worker(store)
    store.settle([worker.outcome("a")])
    with psycopg.connect(store.postgres.url) as reaper:
        reaper.execute("SELECT * FROM workers WHERE epoch = %s FOR UPDATE", [worker.epoch])
        settling = Call(lambda: store.settle([worker.outcome("b")]))
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        wait_until(lambda: one(store, waiting) == 1, "the settlement waits for the reaper")
        reaper.execute("UPDATE workers SET closed_at = now(), closed_reason = 'dead'")
        reaper.commit()
    with pytest.raises(Fenced):
        settling.result()
    assert one(store, "SELECT count(*) FROM results") == 1
