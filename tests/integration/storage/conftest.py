"""A store on a database of the test's own, and servers of the test's own where one is to be broken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.settings import Postgres
from headrace.stack.postgres import PostgresServer
from storage import migrations
from storage.store import Store


@pytest.fixture
def store(postgres_url: str) -> Iterator[Store]:
    """A store on a fresh database."""
    one = Store(Postgres(url=postgres_url))
    yield one
    one.close()


@pytest.fixture(scope="module")
def breakable(session_folder: Path, request: pytest.FixtureRequest) -> Iterator[PostgresServer]:
    """A server that the tests of one module may stop, freeze and kill. Migrated."""
    server = PostgresServer(session_folder / f"breakable-{request.module.__name__.rpartition('.')[2]}")
    server.start()
    migrations.upgrade(server.url)
    yield server
    server.stop()
