"""Postgres deadlocks, drops connections, restarts, freezes: nothing is lost, doubled or left hanging."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator

import msgspec
import psutil
import psycopg
import pytest
import sqlalchemy as sa

from contract.errors import StorageDown
from contract.settings import Postgres
from headrace.stack.postgres import PostgresServer
from storage.database import DeadlineConnection
from storage.rows import Claim, Settlement
from storage.store import Store
from tests.integration.storage.build import TOPIC, Call, Worker, execute, one, rows_of, wait_until

BACKENDS = "SELECT pid FROM pg_stat_activity WHERE application_name = 'headrace' AND datname = current_database()"


def quick(url: str, **fields: float) -> Postgres:
    """Settings with short deadlines."""
    return msgspec.structs.replace(
        Postgres(url=url, connect_timeout_s=2.0, statement_timeout_s=2.0, pool_size=4), **fields
    )


@contextlib.contextmanager
def reply_lost(monkeypatch: pytest.MonkeyPatch, times: int) -> Iterator[list[int]]:
    """The next ``times`` commits reach the server and are done; their replies never come back."""
    left = [times]
    commit = DeadlineConnection.commit

    def cut(connection: DeadlineConnection) -> None:
        commit(connection)
        if left[0]:
            left[0] -= 1
            connection.pgconn.finish()
            raise psycopg.OperationalError("the connection was cut between COMMIT and its reply")

    with monkeypatch.context() as patch:
        patch.setattr(DeadlineConnection, "commit", cut)
        yield left


def processes_of(server: PostgresServer) -> list[int]:
    """The server's first process and all its children."""
    first = int((server.folder / "data" / "postmaster.pid").read_text().split()[0])
    return [first, *(child.pid for child in psutil.Process(first).children(recursive=True))]


def idle_in_transaction(store: Store) -> int:
    count: int = one(
        store,
        "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'"
        " AND datname = current_database() AND pid <> pg_backend_pid()",
    )
    return count


def test_a_commit_whose_reply_was_lost_is_a_success_not_a_duplicate(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(store)
    store.settle([Worker(store, "earlier").outcome("taken")])
    batch = [worker.outcome("a"), worker.outcome("taken"), worker.outcome("b")]
    with reply_lost(monkeypatch, 3) as left:
        verdicts = store.settle(batch)
    assert left == [0]
    assert [(verdict.won, verdict.result.generation) for verdict in verdicts] == [(True, 1), (False, 1), (True, 1)]
    assert one(store, "SELECT count(*) FROM results") == 3
    waste = rows_of(store, "SELECT waste FROM attempts WHERE worker_epoch = %s ORDER BY seq", worker.epoch)
    assert waste == [(None,), ("duplicate",), (None,)]


def test_a_heartbeat_whose_reply_was_lost_counts_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(store)
    with reply_lost(monkeypatch, 1):
        worker.beat([worker.attempt(allocated_ns=7)], busy_ns=7, idle_ns=3)
    with reply_lost(monkeypatch, 1):
        worker.close(idle_ns=5)
    assert rows_of(store, "SELECT seq, busy_ns, idle_ns FROM worker_time ORDER BY seq") == [(1, 7, 3), (2, 0, 5)]
    assert rows_of(store, "SELECT provisioned_ns, closed_reason FROM workers") == [(15, "stopped")]
    assert rows_of(store, "SELECT allocated_ns, waste FROM attempts") == [(7, "aborted")]


def test_settlements_whose_connections_are_cut_fifty_times_lose_and_double_nothing(store: Store) -> None:
    worker = Worker(store)
    chance = random.Random(1)
    progress, ended = threading.Event(), threading.Event()

    def cut() -> None:
        """Cuts connections at random moments, once for each settlement at most, until it has hit some fifty times."""
        hits = 0
        with psycopg.connect(store.postgres.url, autocommit=True) as killer:
            while hits < 50:
                time.sleep(chance.uniform(0, 0.01))
                pids = killer.execute(f"SELECT pg_terminate_backend(pid) FROM ({BACKENDS}) b".encode()).fetchall()
                if pids:
                    hits += 1
                    progress.clear()
                    assert progress.wait(60)
        ended.set()

    killing = Call(cut)
    settled, deadline = 0, time.monotonic() + 60
    while not ended.is_set() and time.monotonic() < deadline:
        verdicts = store.settle([worker.outcome(f"{settled + place}") for place in range(20)])
        assert all(verdict.won for verdict in verdicts)
        settled += 20
        progress.set()
    killing.result()
    assert one(store, "SELECT count(*) FROM results") == settled
    assert one(store, "SELECT count(*) FROM attempts WHERE waste IS NULL") == settled
    assert one(store, "SELECT count(DISTINCT key) FROM settled") == settled


def test_a_deadlock_is_tried_again(store: Store) -> None:
    reasons: list[str] = []
    one_store = Store(store.postgres, on_retry=reasons.append)
    worker = Worker(one_store)
    low, high = sorted((worker.outcome("a"), worker.outcome("b")), key=lambda each: each.result.key)
    insert = (
        "INSERT INTO settled (key, generation, outcome, day, records, winner_epoch)"
        " VALUES (%s, 1, 'ok', now(), '{x}', 0)"
    )
    one_store.settle([worker.outcome("c")])
    with psycopg.connect(store.postgres.url) as rival:
        # Not the victim: Postgres ends whoever looks for a cycle first.
        rival.execute("SET deadlock_timeout = '60s'")
        rival.commit()
        rival.execute(insert, [high.result.key])
        settling = Call(lambda: one_store.settle([high, low]))
        waiting = f"SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND pid IN ({BACKENDS})"
        wait_until(lambda: one(store, waiting) == 1, "the settlement waits for the rival")
        rival.execute(insert, [low.result.key])
        rival.rollback()
    assert [verdict.won for verdict in settling.result()] == [True, True]
    assert "deadlock" in reasons
    one_store.close()


def test_a_lock_that_is_never_released_ends_as_storage_down_and_leaves_no_session(store: Store) -> None:
    impatient = Store(quick(store.postgres.url, statement_timeout_s=0.5))
    worker = Worker(impatient)
    settlement = worker.outcome("a")
    with psycopg.connect(store.postgres.url) as rival:
        rival.execute("LOCK TABLE settled IN ACCESS EXCLUSIVE MODE")
        started = time.monotonic()
        with pytest.raises(StorageDown):
            impatient.settle([settlement])
        assert time.monotonic() - started < 5
        rival.rollback()
    wait_until(lambda: idle_in_transaction(store) == 0, "no session is left in a transaction")
    assert impatient.settle([settlement])[0].won
    impatient.close()


def test_an_error_in_a_transaction_leaves_no_session_in_it(store: Store) -> None:
    worker = Worker(store)
    bad = worker.outcome("a")
    bad.result.output = b"["
    store.settle([bad])
    with pytest.raises(ZeroDivisionError):
        store.database.run(lambda connection: connection.execute(sa.text("SELECT 1")).scalar_one() / 0)
    assert idle_in_transaction(store) == 0


def test_a_client_that_freezes_inside_a_transaction_does_not_keep_its_locks(store: Store) -> None:
    impatient = Store(quick(store.postgres.url, statement_timeout_s=0.5))
    worker = Worker(store)
    frozen, thawed = threading.Event(), threading.Event()

    def work(connection: sa.Connection) -> None:
        connection.execute(sa.text("SELECT * FROM workers WHERE epoch = :epoch FOR UPDATE"), {"epoch": worker.epoch})
        frozen.set()
        thawed.wait(30)

    stuck = Call(lambda: impatient.database.once(work, 0.5))
    assert frozen.wait(10)
    assert store.settle([worker.outcome("a")])[0].won
    thawed.set()
    with pytest.raises(StorageDown):
        stuck.result()
    impatient.close()


class TestServer:
    """With a server of their own to break."""

    @pytest.fixture
    def store(self, breakable: PostgresServer) -> Iterator[Store]:
        breakable.start()
        one_store = Store(quick(breakable.url))
        yield one_store
        one_store.close()

    def test_a_server_that_is_away_is_storage_down_within_the_deadline(self, breakable: PostgresServer) -> None:
        breakable.stop()
        away = Store(quick(breakable.url, statement_timeout_s=0.5))
        for call in (
            lambda: away.ping(1.0),
            lambda: away.stored_results([]),
            lambda: away.look_up(1, [], []),
            lambda: away.register_worker(name="w", pool="p", gpu_kind="cpu", started_ms=0),
        ):
            started = time.monotonic()
            with pytest.raises(StorageDown):
                call()
            assert time.monotonic() - started < 3
        away.close()

    def test_a_restart_of_the_server_in_the_middle_of_work_is_only_a_delay(
        self, breakable: PostgresServer, store: Store
    ) -> None:
        patient = Store(Postgres(url=breakable.url, statement_timeout_s=20))
        worker = Worker(patient, "patient")
        settled: list[Settlement] = []
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                batch = [worker.outcome(f"restart-{len(settled) + place}") for place in range(10)]
                assert all(verdict.won for verdict in patient.settle(batch))
                settled.extend(batch)

        working = Call(work)
        wait_until(lambda: len(settled) > 100, "work is under way")
        for end in (breakable.stop, breakable.kill):
            before = len(settled)
            end()
            breakable.start()
            wait_until(lambda before=before: len(settled) > before + 100, "work goes on")  # type: ignore[misc]
        stop.set()
        working.result()
        count = "SELECT count(*), count(DISTINCT key) FROM results WHERE worker_epoch = %s"
        assert rows_of(patient, count, worker.epoch) == [(len(settled), len(settled))]
        patient.close()

    def test_a_frozen_backend_does_not_hang_a_settlement(self, breakable: PostgresServer, store: Store) -> None:
        worker = Worker(store, "frozen-backend")
        store.settle([worker.outcome("frozen-0")])
        batch = [worker.outcome(f"frozen-1-{place}", output=b'"' + b"x" * 20_000 + b'"') for place in range(500)]
        pids = [pid for (pid,) in rows_of(store, BACKENDS)]
        assert pids
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            # The server as such is well: the deadline of one try passes, the next uses a new connection.
            verdicts = Call(lambda: store.settle(batch)).result(10)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        assert all(verdict.won for verdict in verdicts)
        count = "SELECT count(*) FROM results WHERE worker_epoch = %s"
        assert one(store, count, worker.epoch) == 501

    def test_a_frozen_server_is_storage_down_and_works_again_when_it_thaws(
        self, breakable: PostgresServer, store: Store
    ) -> None:
        worker = Worker(store, "frozen-server")
        batch = [worker.outcome(f"frozen-2-{place}") for place in range(10)]
        store.ping(2)
        family = processes_of(breakable)
        for pid in family:
            os.kill(pid, signal.SIGSTOP)
        try:
            for call in (
                lambda: store.settle(batch),
                lambda: store.look_up(worker.epoch, [Claim(TOPIC, 0, 1, 1)], []),
                lambda: store.ping(1.0),
            ):
                started = time.monotonic()
                with pytest.raises(StorageDown):
                    Call(call).result(30)
                # Two deadlines of one try, and the connect in which the second may have begun.
                assert time.monotonic() - started < 8
        finally:
            for pid in family:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        assert all(verdict.won for verdict in store.settle(batch))
        wait_until(lambda: idle_in_transaction(store) == 0, "no session is left in a transaction")
        assert one(store, "SELECT count(*) FROM results WHERE worker_epoch = %s", worker.epoch) == 10

    def test_closing_the_store_ends_a_call_that_waits_for_the_server(
        self, breakable: PostgresServer, store: Store
    ) -> None:
        breakable.stop()
        patient = Store(Postgres(url=breakable.url, statement_timeout_s=60))
        waiting = Call(lambda: patient.stored_results([]))
        time.sleep(0.1)
        patient.close()
        with pytest.raises(StorageDown):
            waiting.result(5)


def test_both_kinds_of_url_reach_the_same_database(store: Store) -> None:
    url = store.postgres.url
    for same in (
        url,
        url.replace("postgresql://", "postgresql+psycopg://"),
        url.replace("postgresql://", "postgres://"),
    ):
        other = Store(Postgres(url=same))
        other.ping(5)
        other.close()
    parts = psycopg.conninfo.conninfo_to_dict(url)
    keywords = Store(Postgres(url=f"host={parts['host']} user={parts['user']} dbname={parts['dbname']}"))
    keywords.ping(5)
    keywords.close()


def test_a_constructor_connects_nothing() -> None:
    Store(Postgres(url="postgresql://nowhere.invalid/x")).close()


def test_no_session_state_is_left_for_the_next_user_of_a_pooled_connection(store: Store) -> None:
    single = Store(msgspec.structs.replace(store.postgres, pool_size=2))
    worker = Worker(single)
    single.look_up(worker.epoch, [Claim(TOPIC, 0, 1, 1)], [])
    single.settle([worker.outcome("a")])

    def session(connection: sa.Connection) -> tuple[str, str, int]:
        connection.rollback()
        raw = connection.connection.cursor()
        raw.execute(
            "SELECT current_setting('statement_timeout'), current_setting('synchronous_commit'),"
            " (SELECT count(*) FROM pg_prepared_statements)"
        )
        row = raw.fetchone()
        assert row is not None
        return row[0], row[1], row[2]

    with single.database._engine.connect() as connection:
        assert session(connection) == ("0", "on", 0)
    single.close()


def test_a_database_without_tables_says_what_to_do(store: Store) -> None:
    execute(store, "DROP TABLE claims, settled, workers")
    with pytest.raises(Exception, match="headrace migrate") as caught:
        store.look_up(1, [], [])
    assert not isinstance(caught.value, StorageDown)
