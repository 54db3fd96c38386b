"""Migrations give the tables that the code declares, whoever runs them at the same time."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import psycopg
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from contract.settings import Postgres
from contract.statuses import Status, Waste
from headrace.stack.postgres import PostgresServer
from storage import migrations, statements, tables
from storage.store import Store
from tests.integration.storage.build import Worker, one, rows_of

# Everything that makes a table what it is, from the catalogue.
SHAPE = """
SELECT 'column', c.relname, a.attname, a.attnum::text, format_type(a.atttypid, a.atttypmod), a.attnotnull::text,
       a.attidentity::text, pg_get_expr(d.adbin, d.adrelid)
FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p') AND a.attnum > 0
  AND c.relname <> 'alembic_version'
UNION ALL
SELECT 'constraint', c.relname, k.conname, pg_get_constraintdef(k.oid), '', '', '', ''
FROM pg_constraint k JOIN pg_class c ON c.oid = k.conrelid
WHERE c.relnamespace = 'public'::regnamespace AND c.relname <> 'alembic_version'
UNION ALL
SELECT 'index', tablename, indexname, indexdef, '', '', '', '' FROM pg_indexes
WHERE schemaname = 'public' AND tablename <> 'alembic_version'
UNION ALL
SELECT 'table', relname, relkind::text, coalesce(pg_get_partkeydef(oid), ''), obj_description(oid), '', '', ''
FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p') AND relname <> 'alembic_version'
ORDER BY 1, 2, 3, 4
"""


@pytest.fixture
def empty_url(postgres_server: PostgresServer, request: pytest.FixtureRequest) -> Iterator[str]:
    """A database without tables."""
    name = f"empty_{abs(hash(request.node.name))}"
    with psycopg.connect(postgres_server.url_of("postgres"), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
        yield postgres_server.url_of(name)
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def engine(url: str) -> sa.Engine:
    return sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"), poolclass=sa.NullPool)


def test_migrations_give_what_tables_declares(store: Store, empty_url: str) -> None:
    with engine(empty_url).begin() as connection:
        tables.metadata.create_all(connection)
    with psycopg.connect(empty_url) as connection_:
        declared = connection_.execute(SHAPE.encode()).fetchall()
    assert len(declared) > 100
    assert rows_of(store, SHAPE) == declared


def test_alembic_finds_nothing_to_generate(store: Store) -> None:
    with engine(store.postgres.url).connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, tables.metadata) == []


@pytest.mark.parametrize(
    ("table", "constraint", "words"),
    [
        ("settled", "settled_outcome_check", Status),
        ("results", "results_status_check", Status),
        ("attempts", "attempts_waste_check", Waste),
    ],
)
def test_the_database_takes_the_words_of_the_enum_and_no_other(
    store: Store, table: str, constraint: str, words: type[Status] | type[Waste]
) -> None:
    definition = one(
        store,
        "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conname = %s AND conrelid = %s::regclass",
        constraint,
        table,
    )
    assert set(re.findall(r"'(\w+)'", definition)) == {word.value for word in words}


def test_copy_lists_every_column_once() -> None:
    assert list(statements.RESULT_COLUMNS) == [*tables.results.columns.keys()]
    assert list(statements.ATTEMPT_COLUMNS) == [*tables.attempts.columns.keys()]


def test_eight_processes_migrate_an_empty_database_at_once(empty_url: str) -> None:
    code = f"from storage import migrations; migrations.upgrade({empty_url!r}); migrations.upgrade({empty_url!r})"
    processes = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) for _ in range(8)]
    ends = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 8, ends
    store = Store(Postgres(url=empty_url))
    assert store.settle([Worker(store).outcome("a")])[0].won
    store.close()


def test_upgrade_keeps_what_is_there(store: Store) -> None:
    worker = Worker(store)
    store.settle([worker.outcome("a")])
    migrations.upgrade(store.postgres.url)
    assert one(store, "SELECT count(*) FROM results") == 1
