"""Alembic migrations. ``upgrade(url)`` brings a database to this version; any number of processes at once.

The whole upgrade is one transaction under a transaction-scoped advisory lock: a second process waits,
then finds nothing to do. That also works behind a transaction pooler, where a session lock would not.
"""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config

from contract.settings import Postgres
from storage.database import Database

_LOCK = 0x72616365
"""Advisory lock of everybody who migrates ("race")."""
TIMEOUT_S = 300.0
"""Of one upgrade, waiting for another process included."""


def upgrade(url: str, *, timeout_s: float = TIMEOUT_S) -> None:
    """Brings the database at ``url`` to the newest version; harmless when it is there already.

    Raises ``StorageDown`` when it cannot be reached or is not done after ``timeout_s``.
    """
    database = Database(Postgres(url=url, statement_timeout_s=timeout_s))
    try:
        database.once(_upgrade, timeout_s)
    finally:
        database.close()


def configuration(connection: sa.Connection) -> Config:
    """Alembic's configuration for one open connection."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def _upgrade(connection: sa.Connection) -> None:
    connection.execute(sa.text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
    command.upgrade(configuration(connection), "head")
