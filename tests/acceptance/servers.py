"""A broker and a database of one's own, and on them worlds: fresh topics and tables."""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg

from contract import settings as contract_settings
from contract.settings import Settings
from headrace.stack.kafka import KafkaServer
from headrace.stack.postgres import PostgresServer
from storage import migrations
from tests.acceptance.harness import World

Sections = Mapping[str, Mapping[str, Any]]

AT_ONCE: Mapping[str, Any] = {
    "kind": "simulated",
    "simulated_prefill_tokens_per_s": 0,
    "simulated_step_ms": 0,
    "simulated_step_ms_per_request": 0,
}
"""Section ``engine`` of an engine that answers at once."""

_numbers = itertools.count(1)


class Servers:
    """Servers with their data in ``folder``; each world has topics and a database of its own on them.

    ``sections`` are the settings of every world, ``postgres`` options of its server.
    """

    def __init__(self, folder: Path, sections: Sections, postgres: Mapping[str, str] = {}) -> None:
        self.folder = folder
        self.kafka = KafkaServer(folder / "kafka")
        self.postgres = PostgresServer(folder / "postgres", postgres)
        self._sections = sections

    def start(self) -> None:
        """Starts what does not run."""
        self.kafka.start()
        self.postgres.start()

    def stop(self) -> None:
        self.kafka.stop()
        self.postgres.stop()

    def database(self) -> str:
        """URL of a fresh, empty database."""
        name = f"world_{next(_numbers)}"
        self.execute(f"CREATE DATABASE {name}")
        return self.postgres.url_of(name)

    def execute(self, statement: str) -> None:
        """A statement outside of any world."""
        with psycopg.connect(self.postgres.url_of("postgres"), autocommit=True) as connection:
            connection.execute(statement.encode())

    @contextlib.contextmanager
    def world(self, **sections: Mapping[str, Any]) -> Iterator[World]:
        """Topics made and tables migrated; ``sections`` overlay the settings. Starts servers that do not run."""
        self.start()
        url = self.database()
        migrations.upgrade(url)
        settings = self._settings(url, sections)
        world = World(settings, self.folder / settings.topics.prefix)
        try:
            yield world
        finally:
            world.close()

    def _settings(self, url: str, sections: Sections) -> Settings:
        own: dict[str, dict[str, Any]] = {
            "kafka": {"bootstrap_servers": self.kafka.bootstrap_servers},
            "topics": {"prefix": f"w{secrets.token_hex(4)}", "reply_partitions": 1},
            "postgres": {"url": url},
        }
        layers = (own, self._sections, sections)
        names = {name for layer in layers for name in layer}
        return contract_settings.build(
            {name: {field: v for layer in layers for field, v in layer.get(name, {}).items()} for name in names}
        )
