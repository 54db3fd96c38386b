"""``headrace migrate``."""

from __future__ import annotations

import click

from contract import settings
from headrace.commands._output import open_store
from storage import migrations


@click.command()
def command() -> None:
    """Bring the database to this version's tables.

    Safe to run from any number of processes at once, and again: what is there stays. Also makes the day
    partitions of the coming days, and the first price and tariff of an empty database.
    """
    loaded = settings.load()
    with open_store() as store:
        migrations.upgrade(loaded.postgres.url)
        store.make_partitions()
        store.seed_prices(loaded.cost)
    click.echo("the database is up to date")
