"""Connections with client-side deadlines, and the one retry rule. Knows no table.

Every wait for the server is bounded here, in the client: a server that is stopped, swapped out or
cut off does not answer a cancel either, and ``tcp_user_timeout`` knows no Unix sockets. When a
deadline passes, the socket is closed; nothing is left in a transaction on our side, and the server
ends it on its own (each transaction carries its limits as ``SET LOCAL``).

Behind a transaction pooler: no session state, no prepared statements, no session locks.
"""

from __future__ import annotations

import contextlib
import math
import random
import re
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, NoReturn, TypeVar

import psycopg
import sqlalchemy as sa
from psycopg import conninfo
from sqlalchemy import exc

from contract.errors import FatalError, StorageDown
from contract.settings import Postgres

T = TypeVar("T")

RETRY_FACTOR = 2.0
"""A call with retries lasts at most this many times ``statement_timeout_s``."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
_DRIVER_IN_URL = re.compile(r"^postgres(ql)?(\+\w+)?://")

_RETRIED = {
    "40P01": "deadlock",
    "40001": "serialization",
    "55P03": "timeout",  # lock_timeout
    "57014": "timeout",  # statement_timeout
    "25006": "connection",  # read-only: an old primary after a failover
    "25P03": "connection",  # idle_in_transaction_session_timeout
    "25P04": "connection",  # transaction_timeout
}
_RETRIED_CLASSES = {"08": "connection", "57": "connection", "53": "connection", "58": "connection"}
"""Connection exception, operator intervention, out of resources, the server's own system errors."""
_UNMIGRATED = ("42P01", "42703", "3F000")
"""Undefined table, column, schema."""
_DATA_CLASSES = ("22", "23", "54")
"""Data exception, integrity constraint, program limit (a row too large for an index)."""


class DeadlineConnection(psycopg.Connection[tuple[Any, ...]]):
    """A connection on which no wait lasts beyond ``deadline`` (monotonic seconds)."""

    deadline = math.inf

    def wait(self, gen: Generator[Any, Any, T], *args: Any, **options: Any) -> T:
        return super().wait(self._watched(gen), *args, **options)

    def _watched(self, gen: Generator[Any, Any, T]) -> Generator[Any, Any, T]:
        # psycopg wakes a waiting generator at least each 0.1 s, with or without news.
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if time.monotonic() > self.deadline:
                    self.pgconn.finish()
                    raise psycopg.OperationalError("the server did not answer within the client-side deadline")
                wanted = gen.send(ready)
        except StopIteration as stop:
            value: T = stop.value
            return value


def original(error: BaseException) -> BaseException:
    """The driver's error behind one that SQLAlchemy wrapped."""
    wrapped = error.orig if isinstance(error, exc.DBAPIError) else None
    return wrapped or error


def retry_reason(error: BaseException) -> str | None:
    """Why trying again may help, in one word for the metric; None: it will not."""
    cause = original(error)
    if isinstance(cause, exc.TimeoutError):
        return "connection"
    sqlstate = getattr(cause, "sqlstate", None)
    if sqlstate is not None:
        return _RETRIED.get(sqlstate) or _RETRIED_CLASSES.get(sqlstate[:2])
    lost = isinstance(cause, (psycopg.OperationalError, psycopg.InterfaceError))
    return "connection" if lost else None


def is_data_error(error: BaseException) -> bool:
    """Whether one of the rows is at fault: the database cannot hold it, however often it is sent."""
    cause = original(error)
    if isinstance(cause, (UnicodeError, OverflowError)):
        return True
    sqlstate = getattr(cause, "sqlstate", None)
    if sqlstate is None:
        return isinstance(cause, psycopg.DataError)
    return sqlstate[:2] in _DATA_CLASSES


def message_of(error: BaseException) -> str:
    """One line for people: the server's own words, no statement and no parameters."""
    return str(original(error)).strip().split("\n")[0] or type(original(error)).__name__


def _raise(error: Exception) -> NoReturn:
    """The error as it is, or what to do about it where that is known."""
    if getattr(original(error), "sqlstate", None) in _UNMIGRATED:
        text = f"the database lacks this version's tables: run headrace migrate ({message_of(error)})"
        raise FatalError(text) from error
    raise error


class Database:
    """A small pool of connections. Thread-safe; connects on first use."""

    def __init__(self, postgres: Postgres, on_retry: Callable[[str], None] | None = None) -> None:
        self._postgres = postgres
        self._on_retry = on_retry or (lambda reason: None)
        self._closed = threading.Event()
        self._engine = sa.create_engine(
            "postgresql+psycopg://",
            creator=self._connect,
            pool_size=postgres.pool_size,
            max_overflow=0,
            pool_timeout=postgres.statement_timeout_s,
            pool_use_lifo=True,
            use_native_hstore=False,
        )

    def run(self, work: Callable[[sa.Connection], T], *, total_s: float | None = None, read_only: bool = False) -> T:
        """``work`` in one transaction, again after deadlocks and lost connections: it must be idempotent.

        Raises ``StorageDown`` after ``total_s`` (default: ``RETRY_FACTOR`` × ``statement_timeout_s``); other
        errors of ``work`` as they are.
        """
        return self._retried(lambda deadline: self._transaction(work, deadline, read_only), total_s)

    def run_single(self, statement: sa.Executable, parameters: dict[str, Any], *, total_s: float) -> list[sa.Row[Any]]:
        """One statement as its own transaction: a single round trip. Else as ``run``."""

        def work(deadline: float) -> list[sa.Row[Any]]:
            with self._connection(deadline) as connection:
                alone = connection.execution_options(isolation_level="AUTOCOMMIT")
                return list(alone.execute(statement, parameters))

        return self._retried(work, total_s)

    def once(self, work: Callable[[sa.Connection], T], timeout_s: float, *, read_only: bool = False) -> T:
        """``work`` in one transaction, no retry. Raises ``StorageDown`` when it is not done in time."""
        try:
            return self._transaction(work, time.monotonic() + timeout_s, read_only)
        except (exc.SQLAlchemyError, psycopg.Error) as error:
            if retry_reason(error) is None:
                _raise(error)
            raise StorageDown(f"Postgres gave no answer: {message_of(error)}") from error

    def close(self) -> None:
        """Ends waiting retries and closes idle connections."""
        self._closed.set()
        self._engine.dispose()

    def _retried(self, attempt: Callable[[float], T], total_s: float | None) -> T:
        total_s = total_s or RETRY_FACTOR * self._postgres.statement_timeout_s
        end = time.monotonic() + total_s
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return attempt(min(end, time.monotonic() + self._postgres.statement_timeout_s))
            except (exc.SQLAlchemyError, psycopg.Error) as error:
                reason = retry_reason(error)
                if reason is None:
                    _raise(error)
                wait_s = pause_s * random.uniform(0.5, 1.5)
                if time.monotonic() + wait_s > end or self._closed.wait(wait_s):
                    text = f"Postgres gave no answer in {total_s:.0f} s ({reason}): {message_of(error)}"
                    raise StorageDown(text) from error
                self._on_retry(reason)
                pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    def _transaction(self, work: Callable[[sa.Connection], T], deadline: float, read_only: bool) -> T:
        with self._connection(deadline) as connection:
            options: dict[str, Any] = {"postgresql_readonly": True, "isolation_level": "REPEATABLE READ"}
            if read_only:
                connection = connection.execution_options(**options)
            with connection.begin():
                limit_ms = str(max(1, int((deadline - time.monotonic()) * 1000)))
                connection.execute(_LIMITS, {"limit": limit_ms})
                return work(connection)

    @contextlib.contextmanager
    def _connection(self, deadline: float) -> Iterator[sa.Connection]:
        with self._engine.connect() as connection:
            driver(connection).deadline = deadline
            yield connection
            if self._closed.is_set():
                connection.detach()  # out of the pool that is gone: really closed, now

    def _connect(self) -> DeadlineConnection:
        postgres = self._postgres
        parameters = conninfo.conninfo_to_dict(_DRIVER_IN_URL.sub("postgresql://", postgres.url))
        parameters.setdefault("application_name", "headrace")
        parameters.setdefault("connect_timeout", math.ceil(postgres.connect_timeout_s))
        connection = DeadlineConnection.connect(conninfo.make_conninfo("", **parameters), prepare_threshold=None)
        # SQLAlchemy asks a new server for its version before we get the connection.
        connection.deadline = time.monotonic() + postgres.connect_timeout_s
        return connection


def driver(connection: sa.Connection) -> DeadlineConnection:
    """The psycopg connection beneath, for COPY."""
    beneath = connection.connection.driver_connection
    assert isinstance(beneath, DeadlineConnection)
    return beneath


_LIMITS = sa.text(
    "SELECT set_config('statement_timeout', :limit, true),"
    " set_config('idle_in_transaction_session_timeout', :limit, true)"
)
"""The server gives up when we do; a client that is frozen inside a transaction does not hold its locks."""
