"""One read-only statement for a person. The extended protocol takes a single statement only, and the
transaction is read-only, so a statement that was pasted in cannot change anything."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Generator
from typing import Any, cast

import psycopg
import sqlalchemy as sa

from contract.errors import InvalidRequest
from storage.database import driver, message_of, retry_reason
from storage.store import Store


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """Rows of a statement; ``more``: there were more than asked for."""

    columns: list[str]
    rows: list[tuple[Any, ...]]
    more: bool = False


def run(store: Store, statement: str, *, timeout_s: float, max_rows: int) -> Answer:
    """The first ``max_rows`` rows of ``statement``.

    Raises ``InvalidRequest`` when Postgres refuses it, ``StorageDown`` after ``timeout_s``.
    """

    def work(connection: sa.Connection) -> Answer:
        try:
            with driver(connection).cursor() as cursor:
                stream = cast("Generator[tuple[Any, ...]]", cursor.stream(statement.encode()))
                rows = list(itertools.islice(stream, max_rows + 1))
                stream.close()  # cancels what was not read
                columns = [column.name for column in cursor.description or ()]
        except psycopg.Error as error:
            if isinstance(error, psycopg.errors.ReadOnlySqlTransaction) or retry_reason(error) is None:
                raise InvalidRequest(message_of(error), code="refused_by_postgres") from error
            raise
        return Answer(columns, rows[:max_rows], len(rows) > max_rows)

    return store.database.once(work, timeout_s, read_only=True)


def tables(store: Store) -> Answer:
    """Our tables, about how many rows each has, and what it is for."""
    rows = store.database.run(lambda connection: connection.execute(_TABLES).all(), read_only=True)
    return Answer(["table", "about_rows", "meaning"], [tuple(row) for row in rows])


_TABLES = sa.text("""
    SELECT c.relname, greatest(0, c.reltuples + coalesce((
               SELECT sum(greatest(0, p.reltuples)) FROM pg_inherits i JOIN pg_class p ON p.oid = i.inhrelid
               WHERE i.inhparent = c.oid), 0))::bigint, coalesce(obj_description(c.oid, 'pg_class'), '')
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = current_schema() AND c.relkind IN ('r', 'p', 'v', 'm') AND NOT c.relispartition
    ORDER BY c.relname
""")
