"""Broker and Postgres of one machine: those that the settings name, else our own, with our own data folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from contract import settings
from contract.settings import Settings
from headrace.stack.kafka import KafkaServer
from headrace.stack.postgres import PostgresServer

KAFKA_VARIABLE = "HEADRACE_KAFKA__BOOTSTRAP_SERVERS"
POSTGRES_VARIABLE = "HEADRACE_POSTGRES__URL"


class Machine:
    """Starts what is not configured. ``with`` starts and stops it.

    A broker or a database that the settings file or the environment names is used as it is and left
    running; the other one is started in ``folder``, where its data stays.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kafka: KafkaServer | None = None
        """Ours; None while none runs or when one is configured."""
        self.postgres: PostgresServer | None = None
        """Likewise."""

    def start(self) -> None:
        """Returns when both answer. Raises ``StackError`` or ``SettingsError``; what was started is stopped then."""
        _, origins = settings.read(None, os.environ)
        current = settings.load()
        try:
            if "postgres.url" not in origins:
                self.postgres = PostgresServer(self.folder / "postgres")
                self.postgres.start()
            if "kafka.bootstrap_servers" not in origins:
                limit = str(current.topics.max_message_bytes)
                self.kafka = KafkaServer(self.folder / "kafka", {"message.max.bytes": limit})
                self.kafka.start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stops what we started; harmless when nothing runs."""
        if self.kafka is not None:
            self.kafka.stop()
        if self.postgres is not None:
            self.postgres.stop()

    def __enter__(self) -> Machine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def environment(self) -> dict[str, str]:
        """Variables that point any headrace command at the servers we started."""
        variables = {}
        if self.kafka is not None:
            variables[KAFKA_VARIABLE] = self.kafka.bootstrap_servers
        if self.postgres is not None:
            variables[POSTGRES_VARIABLE] = self.postgres.url
        return variables

    def settings(self, extra: Mapping[str, str] | None = None) -> Settings:
        """Settings of file and environment, with our servers and ``extra`` variables on top."""
        return settings.load(environ={**os.environ, **self.environment, **(extra or {})})
