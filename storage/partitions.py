"""Day partitions of results and attempts: made ahead, made on demand, dropped by retention.

Any number of processes may make the same days at once: a transaction-scoped advisory lock lets one
work and the others find it done. A partition is built beside its parent and attached, which stops no
writer (``CREATE … PARTITION OF`` would wait for all of them).
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Iterable
from typing import TypeVar

import psycopg
import sqlalchemy as sa
from sqlalchemy import exc

from storage.database import Database, original

T = TypeVar("T")

PARENTS = ("results", "attempts")
_LOCK = 0x68656164
"""Advisory lock of everybody who makes or drops partitions ("head")."""
_DAY_IN_NAME = re.compile(r"_(\d{4})_(\d{2})_(\d{2})$")
_PRUNED_AT_ONCE = 20_000
_TRIES = 3


class Days:
    """The days whose partitions exist, as far as this process knows. Thread-safe."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: set[dt.date] = set()

    def run(self, days: set[dt.date], work: Callable[[sa.Connection], T]) -> T:
        """``database.run(work)`` with the partitions of ``days`` made before it where they are missing."""
        for tries_left in reversed(range(_TRIES)):
            if not days <= self._known:
                make(self._database, days - self._known)
                self._known |= days
            try:
                return self._database.run(work)
            except (exc.DBAPIError, psycopg.Error) as error:
                # Retention dropped a day that we thought was there: an old record came after all.
                if not tries_left or not _misses_partition(error):
                    raise
                self._known.clear()
        raise AssertionError("the last try returns or raises")


def _misses_partition(error: BaseException) -> bool:
    """A row without a partition has the SQLSTATE of a failed check, but names no constraint."""
    cause = original(error)
    return isinstance(cause, psycopg.errors.CheckViolation) and cause.diag.constraint_name is None


def name_of(parent: str, day: dt.date) -> str:
    """Name of the partition of ``parent`` for one UTC day."""
    return f"{parent}_{day.year:04}_{day.month:02}_{day.day:02}"


def make(database: Database, days: Iterable[dt.date]) -> None:
    """Makes the partitions of ``days`` that are missing."""
    wanted = sorted(set(days))

    def work(connection: sa.Connection) -> None:
        connection.execute(sa.text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
        there = _existing(connection)
        for day in wanted:
            for parent in PARENTS:
                name, after = name_of(parent, day), day + dt.timedelta(days=1)
                if name not in there:
                    connection.execute(sa.text(f"CREATE TABLE {name} (LIKE {parent} INCLUDING ALL)"))
                    bounds = f"FOR VALUES FROM ('{day.isoformat()}') TO ('{after.isoformat()}')"
                    connection.execute(sa.text(f"ALTER TABLE {parent} ATTACH PARTITION {name} {bounds}"))

    if wanted:
        database.run(work)


def make_ahead(database: Database, days_ahead: int) -> None:
    """Makes today's partitions (UTC, server clock) and those of the next ``days_ahead`` days."""
    day = today(database)
    make(database, [day + dt.timedelta(days=offset) for offset in range(days_ahead + 1)])


def today(database: Database) -> dt.date:
    """The server's UTC day."""
    day: dt.date = database.run(lambda connection: connection.execute(_TODAY).scalar_one())
    return day


def drop_old(database: Database, *, results_days: int, key_horizon_days: int) -> list[str]:
    """Drops partitions older than ``results_days``; forgets keys and dead claims older than ``key_horizon_days``,
    and workers whose every attempt is gone. Returns the names of the dropped partitions.

    A key is forgotten by the day of its last record, so that every record that may still be run (younger
    than the horizon) finds its key.
    """
    day = today(database)
    kept_from = day - dt.timedelta(days=results_days)
    remembered_from = day - dt.timedelta(days=key_horizon_days)
    old = [name for name, of in database.run(_existing).items() if of < kept_from]
    for name in old:
        database.run(lambda connection, name=name: _drop(connection, name))  # type: ignore[misc]
    for statement, bound in (
        (_FORGET_KEYS, remembered_from),
        (_FORGET_SUSPECTS, remembered_from),
        (_FORGET_CLAIMS, remembered_from),
        (_FORGET_TIME, kept_from),
        (_FORGET_WORKERS, kept_from),
    ):
        while database.run(lambda connection, s=statement, b=bound: _delete(connection, s, b)):  # type: ignore[misc]
            pass
    return old


def _existing(connection: sa.Connection) -> dict[str, dt.date]:
    names = connection.execute(_PARTITIONS, {"parents": list(PARENTS)}).scalars()
    found = ((name, _DAY_IN_NAME.search(name)) for name in names)
    return {name: dt.date(*map(int, match.groups())) for name, match in found if match}


def _drop(connection: sa.Connection, name: str) -> None:
    # One partition a transaction: it needs its parent's strongest lock, and holding two would deadlock with
    # settlements. It waits for that lock only briefly, because writers queue behind it.
    connection.execute(sa.text("SET LOCAL lock_timeout = '1s'"))
    connection.execute(sa.text(f"DROP TABLE IF EXISTS {name}"))


def _delete(connection: sa.Connection, statement: sa.TextClause, bound: dt.date) -> bool:
    return connection.execute(statement, {"bound": bound, "most": _PRUNED_AT_ONCE}).rowcount > 0


_TODAY = sa.text("SELECT (now() AT TIME ZONE 'UTC')::date")
_PARTITIONS = sa.text(
    "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid"
    " JOIN pg_class p ON p.oid = i.inhparent WHERE p.oid = ANY (CAST(:parents AS regclass[]))"
)
_FORGET_KEYS = sa.text(
    "DELETE FROM settled WHERE ctid = ANY (ARRAY(SELECT ctid FROM settled WHERE day < :bound LIMIT :most))"
)
_FORGET_SUSPECTS = sa.text(
    "DELETE FROM suspects WHERE key = ANY (ARRAY(SELECT key FROM suspects"
    " WHERE (noted_at AT TIME ZONE 'UTC')::date < :bound LIMIT :most))"
)
_FORGET_CLAIMS = sa.text(
    "DELETE FROM claims WHERE ctid = ANY (ARRAY(SELECT c.ctid FROM claims c JOIN workers w ON w.epoch = c.worker_epoch"
    " WHERE (w.closed_at AT TIME ZONE 'UTC')::date < :bound LIMIT :most))"
)
# A worker closed before the oldest kept day can have no attempt left; its time goes with it.
_FORGET_TIME = sa.text(
    "DELETE FROM worker_time WHERE ctid = ANY (ARRAY(SELECT t.ctid FROM worker_time t"
    " JOIN workers w ON w.epoch = t.worker_epoch WHERE (w.closed_at AT TIME ZONE 'UTC')::date < :bound LIMIT :most))"
)
_FORGET_WORKERS = sa.text(
    "DELETE FROM workers WHERE ctid = ANY (ARRAY(SELECT ctid FROM workers"
    " WHERE (closed_at AT TIME ZONE 'UTC')::date < :bound LIMIT :most))"
)
