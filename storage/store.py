"""The only class that writes to the database. Synchronous, thread-safe; a method is a transaction.

Every method may raise ``StorageDown`` when Postgres gave no answer within its deadline, and may then be
called again: all of them are idempotent. None leaves a session in a transaction.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import uuid
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import sqlalchemy as sa

from contract import identity
from contract.errors import FatalError, Fenced, InvalidRequest
from contract.money import Tariff
from contract.settings import Cost, Postgres
from contract.statuses import Status, Waste
from storage import partitions, statements
from storage.database import Database
from storage.mapping import day_at, keyless_attempt, result_from, words
from storage.rows import (
    AttemptRow,
    Claim,
    Memory,
    ResultRow,
    Settled,
    Settlement,
    Suspect,
    TimeRow,
    Verdict,
    day_of,
)
from storage.settling import Settling

BEGINNING = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
"""From when the first price and tariff hold: before anything that could be priced."""


class Store:
    """Everything headrace keeps. The constructor connects nothing.

    Args:
        postgres: the settings of the database; ``url`` may be SQLAlchemy's or libpq's, TCP or Unix socket.
        on_retry: hears why a transaction is tried again: ``deadlock``, ``serialization``, ``connection``, ``timeout``.
    """

    def __init__(self, postgres: Postgres, *, on_retry: Callable[[str], None] | None = None) -> None:
        self.postgres = postgres
        self.database = Database(postgres, on_retry)
        self._days = partitions.Days(self.database)
        self._settling = Settling(self.database, self._days)

    def ping(self, timeout_s: float) -> None:
        """Returns when Postgres answers. Raises ``StorageDown`` when it does not within ``timeout_s``."""
        self.database.once(lambda connection: connection.execute(sa.select(1)).scalar_one(), timeout_s)

    def close(self) -> None:
        """Ends waiting retries and closes idle connections. Harmless twice."""
        self.database.close()

    # -- workers and their time -------------------------------------------------------------------

    def register_worker(self, *, name: str, pool: str, gpu_kind: str, started_ms: int) -> int:
        """A new epoch for a worker process. One whose reply was lost stays behind, empty, and is reaped."""
        found = {"name": name, "pool": pool, "gpu_kind": gpu_kind, "started_ms": started_ms}
        epoch: int = self.database.run(lambda c: c.execute(statements.REGISTER_WORKER, found).scalar_one())
        return epoch

    def beat(self, row: TimeRow, provisioned_ns: int, orphans: Sequence[AttemptRow] = ()) -> None:
        """A heartbeat: time by state, provisioned time so far, and attempts that belong to no outcome.

        Raises ``Fenced`` when the epoch is closed.
        """
        self._days.run(_days_of(orphans), lambda connection: _beat(connection, row, provisioned_ns, orphans))

    def close_worker(self, row: TimeRow, provisioned_ns: int, orphans: Sequence[AttemptRow] = ()) -> None:
        """The last heartbeat of a worker that ends well; it has nothing in its hands any more.

        Raises ``Fenced`` when somebody else closed the epoch.
        """

        def work(connection: sa.Connection) -> None:
            epoch = {"epoch": row.worker_epoch}
            if connection.execute(statements.IS_STOPPED, epoch).scalar():
                return
            _beat(connection, row, provisioned_ns, orphans)
            connection.execute(statements.CLOSE_WORKER, epoch)
            connection.execute(statements.RELEASE_ALL_CLAIMS, epoch)

        self._days.run(_days_of(orphans), work)

    def reap(self, dead_after_s: float) -> list[int]:
        """Closes the epochs that have been silent for ``dead_after_s`` by the server's clock; returns them.

        What such a worker was provisioned for and never told is *lost*. Busy time that no attempt was
        settled for is a ``crash`` line. Where attempts were settled whose busy time it could not tell any
        more, that time is proven all the same and is added as its last row.
        """
        days = self.database.run(lambda connection: {day_of(row.last_ms) for row in _dead(connection, dead_after_s)})
        if not days:
            return []
        return self._days.run(
            days, lambda connection: [_bury(connection, row) for row in _dead(connection, dead_after_s)]
        )

    # -- what a window asks -----------------------------------------------------------------------

    def look_up(self, worker_epoch: int, claims: Sequence[Claim], keys: Sequence[str]) -> Memory:
        """Notes what a worker has in its hands and tells what is remembered of keys. One round trip."""
        places = {(claim.topic, claim.partition): claim for claim in claims}
        found = {
            "epoch": worker_epoch,
            "topics": [topic for topic, _ in places],
            "partitions": [partition for _, partition in places],
            "firsts": [claim.first_offset for claim in places.values()],
            "lasts": [claim.last_offset for claim in places.values()],
            "keys": words(keys),
        }
        total_s = self.postgres.statement_timeout_s
        rows = self.database.run_single(statements.LOOK_UP, found, total_s=total_s)
        memory = Memory({}, {})
        for row in rows:
            key = str(row.key)
            if row.deaths is None:
                status = Status(row.outcome)
                memory.settled[key] = Settled(key, row.generation, status, row.day, tuple(row.records))
            else:
                memory.suspects[key] = Suspect(key, row.deaths, row.worker_epoch)
        return memory

    def stored_results(self, keys: Sequence[str]) -> dict[str, ResultRow]:
        """The visible result of each remembered key whose result is kept."""
        found = {"keys": list(keys)}
        rows = self.database.run(lambda connection: connection.execute(statements.VISIBLE_RESULTS, found).all())
        return {row.key: result_from(row) for row in rows}

    def release_claims(self, worker_epoch: int, partitions: Sequence[tuple[str, int]]) -> None:
        """The worker has nothing of these (topic, partition) in its hands any more."""
        found = {
            "epoch": worker_epoch,
            "topics": [topic for topic, _ in partitions],
            "partitions": [partition for _, partition in partitions],
        }
        self.database.run(lambda connection: connection.execute(statements.RELEASE_CLAIMS, found))

    def open_claims(self, topic: str, partition: int, worker_epoch: int) -> list[tuple[int, int]]:
        """(first, last) offsets that other epochs have claimed of a partition and never gave back."""
        found = {"topic": topic, "partition": partition, "epoch": worker_epoch}
        rows = self.database.run(lambda connection: connection.execute(statements.OPEN_CLAIMS, found).all())
        return [(row.first_offset, row.last_offset) for row in rows]

    # -- suspects ---------------------------------------------------------------------------------

    def write_suspects(
        self, deaths: Mapping[str, int], worker_epoch: int | None, survivors: Sequence[str] = ()
    ) -> None:
        """Notes deaths per key, and in whose engine the keys are about to be (None: in nobody's).

        ``survivors`` have left an engine that still lives; they are in nobody's.
        """
        found = {
            "keys": list(deaths),
            "deaths": list(deaths.values()),
            "epoch": worker_epoch,
            "survivors": list(survivors),
        }
        self.database.run(lambda connection: connection.execute(statements.WRITE_SUSPECTS, found))

    def clear_suspects(self, keys: Sequence[str]) -> None:
        """These requests have an outcome."""
        self.database.run(lambda connection: connection.execute(statements.CLEAR_SUSPECTS, {"keys": list(keys)}))

    # -- settlement -------------------------------------------------------------------------------

    def settle(self, batch: Sequence[Settlement]) -> list[Verdict]:
        """Makes outcomes durable, all or none; a verdict for each, in order.

        Won: the row given, with its generation; it is the visible one. Not won: another answered the key;
        the verdict carries that stored row, and our attempts are booked as waste. A row that cannot be
        stored comes back as ``failed``, code ``unstorable``. Raises ``Fenced`` when the worker's epoch is
        closed.
        """
        return self._settling.settle(batch)

    # -- results ----------------------------------------------------------------------------------

    def find_result(self, id: str, source: str | None = None) -> list[ResultRow]:
        """Results by publisher's id (of one source or of all) or by key; newest first, every generation."""
        keys = [] if source is None else [identity.request_key(source, id)]
        with contextlib.suppress(ValueError):
            keys.append(str(uuid.UUID(id)))

        def work(connection: sa.Connection) -> list[ResultRow]:
            days = [name.replace("_", "-") for name in connection.execute(statements.PARTITION_DAYS).scalars() if name]
            found = {"id": id, "source": source, "keys": keys, "days": days}
            return [result_from(row) for row in connection.execute(statements.FIND_RESULTS, found)]

        return self.database.run(work)

    def attempts_of(self, row: ResultRow) -> list[dict[str, Any]]:
        """Every attempt of one result, also those that nobody pays for, oldest first."""
        found = {"key": row.key, "generation": row.generation, "day": day_at(row.appended_ms)}
        rows = self.database.run(lambda connection: connection.execute(statements.ATTEMPTS_OF, found).mappings().all())
        return [dict(each) for each in rows]

    # -- prices -----------------------------------------------------------------------------------

    def tariff(self, model: str | None, at_ms: int) -> Tariff:
        """The tariff in force for a model: its own, else the one for every model. Raises ``FatalError``: none is."""
        found = {"model": model, "at_ms": at_ms}
        row = self.database.run(lambda connection: connection.execute(statements.TARIFF_AT, found).one_or_none())
        if row is None:
            raise FatalError(f"no tariff holds for model {model!r}: add one with headrace cost tariff add")
        return Tariff(row.tariff_id, row.input_usd, row.cached_input_usd, row.output_usd)

    def seed_prices(self, cost: Cost) -> None:
        """The first price of this kind of GPU and the first tariff, where there is none yet."""

        def work(connection: sa.Connection) -> None:
            price = {"gpu_kind": cost.gpu_kind, "usd_per_hour": Decimal(cost.gpu_usd_per_hour)}
            connection.execute(statements.SEED_GPU_PRICE, price | {"valid_from": BEGINNING})
            connection.execute(
                statements.SEED_TARIFF,
                {
                    "valid_from": BEGINNING,
                    "input_usd": Decimal(cost.input_usd_per_million),
                    "cached_input_usd": Decimal(cost.cached_input_usd_per_million),
                    "output_usd": Decimal(cost.output_usd_per_million),
                },
            )

        self.database.run(work)

    def add_tariff(
        self,
        *,
        model: str | None,
        valid_from: dt.datetime,
        input_usd: Decimal,
        cached_input_usd: Decimal,
        output_usd: Decimal,
    ) -> int:
        """A tariff (US dollars per million tokens) that holds from ``valid_from``; its id.

        Raises ``InvalidRequest`` when another one begins at the same moment: what was quoted is not rewritten.
        """
        found = {
            "model": model,
            "valid_from": valid_from,
            "input_usd": input_usd,
            "cached_input_usd": cached_input_usd,
            "output_usd": output_usd,
        }

        def work(connection: sa.Connection) -> int | None:
            connection.execute(statements.ADD_TARIFF, found)
            return connection.execute(statements.SAME_TARIFF, found).scalar()

        tariff_id = self.database.run(work)
        if tariff_id is None:
            raise InvalidRequest(f"another tariff for {model or 'every model'} begins at {valid_from.isoformat()}")
        return tariff_id

    def add_gpu_price(self, *, gpu_kind: str, valid_from: dt.datetime, usd_per_hour: Decimal) -> None:
        """A price of an hour that holds from ``valid_from``. Raises ``InvalidRequest`` as ``add_tariff`` does."""
        found = {"gpu_kind": gpu_kind, "valid_from": valid_from, "usd_per_hour": usd_per_hour}

        def work(connection: sa.Connection) -> bool:
            connection.execute(statements.ADD_GPU_PRICE, found)
            return connection.execute(statements.SAME_GPU_PRICE, found).first() is not None

        if not self.database.run(work):
            raise InvalidRequest(f"another price of {gpu_kind} begins at {valid_from.isoformat()}")

    def prices(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """All GPU prices and all tariffs, oldest first."""

        def work(connection: sa.Connection) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
            lists = (statements.LIST_GPU_PRICES, statements.LIST_TARIFFS)
            gpu_prices, tariffs = ([dict(row) for row in connection.execute(each).mappings()] for each in lists)
            return gpu_prices, tariffs

        return self.database.run(work)

    # -- housekeeping -----------------------------------------------------------------------------

    def make_partitions(self) -> None:
        """Day partitions for today and ``partitions_ahead_days`` more. Any number of processes at once."""
        partitions.make_ahead(self.database, self.postgres.partitions_ahead_days)

    def drop_old(self) -> list[str]:
        """Retention: drops days older than ``results_days``, forgets keys older than ``key_horizon_days``.

        Returns the names of the partitions dropped.
        """
        return partitions.drop_old(
            self.database, results_days=self.postgres.results_days, key_horizon_days=self.postgres.key_horizon_days
        )


def _time_values(row: TimeRow) -> dict[str, int]:
    return {name: getattr(row, name) for name in TimeRow.__dataclass_fields__}


def _beat(connection: sa.Connection, row: TimeRow, provisioned_ns: int, orphans: Sequence[AttemptRow]) -> None:
    found = {"epoch": row.worker_epoch, "provisioned_ns": provisioned_ns}
    pool = connection.execute(statements.BEAT, found).scalar()
    if pool is None:
        raise Fenced(f"worker epoch {row.worker_epoch} was closed by another")
    connection.execute(statements.ADD_TIME, _time_values(row))
    if orphans:
        lines = [keyless_attempt(attempt, pool, Waste.ABORTED) for attempt in orphans]
        connection.execute(statements.ADD_ATTEMPTS, lines)


def _days_of(attempts: Sequence[AttemptRow]) -> set[dt.date]:
    return {day_of(attempt.ended_ms) for attempt in attempts}


def _dead(connection: sa.Connection, dead_after_s: float) -> Sequence[sa.Row[Any]]:
    return connection.execute(statements.LOCK_DEAD, {"dead_after_s": dead_after_s}).all()


def _bury(connection: sa.Connection, dead: sa.Row[Any]) -> int:
    """Closes one dead epoch's ledger, so that every identity holds for it."""
    epoch: int = dead.epoch
    # One day of grace: its clock is not the one that made its first attempts' day.
    first_day = day_of(dead.started_ms) - dt.timedelta(days=1)
    allocated_ns: int = connection.execute(statements.ALLOCATED, {"epoch": epoch, "first_day": first_day}).scalar_one()
    unsettled_ns = dead.busy_ns - dead.rounding_ns - allocated_ns
    untold_ns = max(0, -unsettled_ns)
    if untold_ns:
        last = TimeRow(worker_epoch=epoch, seq=dead.last_seq + 1, at_ms=dead.last_ms, busy_ns=untold_ns)
        connection.execute(statements.ADD_TIME, _time_values(last))
    if unsettled_ns > 0:
        crash = AttemptRow(
            worker_epoch=epoch, seq=-1, allocated_ns=unsettled_ns, started_ms=dead.started_ms, ended_ms=dead.last_ms
        )
        connection.execute(statements.ADD_ATTEMPTS, [keyless_attempt(crash, dead.pool, Waste.CRASH)])
    told_ns = dead.told_ns + untold_ns
    provisioned_ns = max(dead.provisioned_ns, told_ns if untold_ns else 0)
    connection.execute(
        statements.BURY,
        {"epoch": epoch, "provisioned_ns": provisioned_ns, "lost_ns": max(0, provisioned_ns - told_ns)},
    )
    return epoch
