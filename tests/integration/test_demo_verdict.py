"""The demo's verdict: each way to be unsound is found."""

from __future__ import annotations

import time
from collections.abc import Iterator

import psycopg
import pytest

from contract import identity
from contract.settings import Postgres
from contract.statuses import Status
from headrace.demo.load import ONLINE
from headrace.demo.tally import Tally
from headrace.demo.verdict import judge
from storage.rows import ResultRow, Settlement
from storage.store import Store


@pytest.fixture
def store(postgres_url: str) -> Iterator[Store]:
    store = Store(Postgres(url=postgres_url))
    now_ms = int(time.time() * 1000)
    epoch = store.register_worker(name="w", pool="default", gpu_kind="cpu", started_ms=now_ms)
    rows = [
        ResultRow(
            key=identity.request_key("demo", name),
            id=name,
            source="demo",
            pool="default",
            class_name=ONLINE,
            bucket="short",
            status=Status.EXPIRED,
            worker="w",
            worker_epoch=epoch,
            topic="t",
            partition=0,
            offset=offset,
            appended_ms=now_ms,
            settled_ms=now_ms,
        )
        for offset, name in enumerate(["online-1", "online-2"])
    ]
    assert all(verdict.won for verdict in store.settle([Settlement(row) for row in rows]))
    yield store
    store.close()


@pytest.fixture
def tally() -> Tally:
    tally = Tally()
    for name in ("online-1", "online-2"):
        key = identity.request_key("demo", name)
        tally.acknowledged(ONLINE, key, name)
        tally.seen[key] = 1
    return tally


def test_run_with_every_outcome_once_is_sound(store: Store, tally: Tally) -> None:
    verdict = judge(store, tally)
    assert verdict.sound, verdict
    assert verdict.published == 2


def test_acknowledged_request_without_an_outcome_is_lost(store: Store, tally: Tally) -> None:
    tally.acknowledged(ONLINE, identity.request_key("demo", "online-3"), "online-3")
    verdict = judge(store, tally)
    assert (verdict.lost, verdict.sound) == (["online-3"], False)


def test_outcome_that_never_came_on_the_topic_is_told(store: Store, tally: Tally) -> None:
    del tally.seen[identity.request_key("demo", "online-2")]
    verdict = judge(store, tally)
    assert (verdict.unpublished, verdict.sound) == (["online-2"], False)


def test_two_different_results_are_a_double(store: Store, tally: Tally) -> None:
    tally.conflicting.add(identity.request_key("demo", "online-1"))
    verdict = judge(store, tally)
    assert (verdict.doubled, verdict.sound) == (["online-1"], False)


def test_ledger_that_does_not_add_up_is_told(store: Store, tally: Tally, postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as connection:
        connection.execute("UPDATE results SET charge_usd = 1 WHERE id = 'online-1'")
    verdict = judge(store, tally)
    assert verdict.findings
    assert not verdict.sound
