"""Rows for tests: a request answered, refused or tried, with everything said by default."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import psycopg

from contract import identity
from contract.money import Tariff, Usage
from contract.statuses import Status, Waste
from storage.rows import AttemptRow, ResultRow, Settlement, TimeRow
from storage.store import Store

TOPIC = "headrace.default.online.short"
MS = 1_000_000
"""ns per ms."""


def now_ms() -> int:
    return int(time.time() * 1000)


class Worker:
    """A worker as the database sees it: registers, hands in outcomes, tells its time."""

    def __init__(self, store: Store, name: str = "w", *, gpu_kind: str = "cpu", started_ms: int | None = None) -> None:
        self.store = store
        self.name = name
        self.started_ms = started_ms or now_ms()
        self.epoch = store.register_worker(name=name, pool="default", gpu_kind=gpu_kind, started_ms=self.started_ms)
        self.seqs = itertools.count(1)
        self.offsets = itertools.count(1)
        self.rows = 0
        self.provisioned_ns = 0

    def outcome(
        self,
        id: str | None = None,
        status: Status = Status.OK,
        *,
        offset: int | None = None,
        partition: int = 0,
        attempts: Sequence[AttemptRow] | None = None,
        usage: Usage | None = None,
        tariff: Tariff | None = None,
        **fields: Any,
    ) -> Settlement:
        """A settlement. Answers have one attempt, by ``tariff`` or free; refusals have none."""
        offset = next(self.offsets) if offset is None else offset
        source = fields.pop("source", "tests")
        usage = usage or Usage(10, 2, 5)
        row = ResultRow(
            key=identity.request_key(source, id) if id else identity.record_key(TOPIC, partition, offset),
            id=id,
            source=source,
            pool="default",
            class_name="online",
            bucket="short",
            status=status,
            worker=self.name,
            worker_epoch=self.epoch,
            topic=TOPIC,
            partition=partition,
            offset=offset,
            appended_ms=fields.pop("appended_ms", now_ms()),
            settled_ms=fields.pop("settled_ms", now_ms()),
        )
        if status in (Status.OK, Status.DEGRADED):
            row.output = b'{"choices":[{"index":0,"text":"hello"}]}'
            row.model = "tiny"
            row.prompt_tokens, row.cached_tokens = usage.prompt_tokens, usage.cached_tokens
            row.output_tokens, row.usage_contradictory = usage.output_tokens, usage.contradictory
            attempts = [self.attempt(usage=usage, tariff=tariff)] if attempts is None else attempts
        elif status is not Status.CACHED:
            row.error_code, row.error_message = fields.pop("error_code", "a_reason"), "told to people"
        for name, value in fields.items():
            setattr(row, name, value)
        return Settlement(row, list(attempts or ()))

    def attempt(
        self,
        *,
        allocated_ns: int = MS,
        waste: Waste | None = None,
        usage: Usage | None = None,
        tariff: Tariff | None = None,
        ended_ms: int | None = None,
    ) -> AttemptRow:
        usage = usage or Usage(10, 2, 5)
        ended_ms = now_ms() if ended_ms is None else ended_ms
        return AttemptRow(
            worker_epoch=self.epoch,
            seq=next(self.seqs),
            waste=waste,
            allocated_ns=allocated_ns,
            charge_usd=tariff.charge_usd(usage) if tariff and waste is None else Decimal(0),
            tariff_id=tariff.tariff_id if tariff and waste is None else None,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens,
            started_ms=ended_ms - 1,
            ended_ms=ended_ms,
        )

    def time_row(self, **ns: int) -> TimeRow:
        """The next row of its time, by state."""
        self.rows += 1
        self.provisioned_ns += sum(amount for name, amount in ns.items() if name not in ("rounding_ns", "at_ms"))
        return TimeRow(worker_epoch=self.epoch, seq=self.rows, at_ms=ns.pop("at_ms", now_ms()), **ns)

    def beat(self, orphans: Sequence[AttemptRow] = (), **ns: int) -> None:
        row = self.time_row(**ns)
        self.store.beat(row, self.provisioned_ns, orphans)

    def close(self, orphans: Sequence[AttemptRow] = (), **ns: int) -> None:
        row = self.time_row(**ns)
        self.store.close_worker(row, self.provisioned_ns, orphans)

    def fall_silent(self, for_s: float = 3600) -> None:
        """Moves its heartbeat into the past."""
        age = f"{for_s} seconds"
        execute(self.store, "UPDATE workers SET heartbeat_at = now() - %s::interval WHERE epoch = %s", age, self.epoch)


def execute(store: Store, statement: str, *values: Any) -> None:
    """One statement by hand, past the store."""
    with psycopg.connect(store.postgres.url, autocommit=True) as connection:
        connection.execute(statement.encode(), values or None)


def rows_of(store: Store, statement: str, *values: Any) -> list[tuple[Any, ...]]:
    """The rows of a statement, past the store."""
    with psycopg.connect(store.postgres.url, autocommit=True) as connection:
        return connection.execute(statement.encode(), values or None).fetchall()


def one(store: Store, statement: str, *values: Any) -> Any:
    """The only value of a statement."""
    ((value,),) = rows_of(store, statement, *values)
    return value


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 20.0) -> None:
    """Returns once ``condition`` holds."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"waited {timeout_s} s for: {what}"
        time.sleep(0.01)


class Call(threading.Thread):
    """A call in a thread; ``result`` joins and returns or raises what it did."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._function = function
        self._value: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:  # noqa: BLE001 - handed to whoever asks
            self._error = error

    def result(self, timeout_s: float = 60.0) -> Any:
        self.join(timeout_s)
        assert not self.is_alive(), f"still running after {timeout_s} s"
        if self._error is not None:
            raise self._error
        return self._value
