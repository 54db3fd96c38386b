"""``headrace worker``: one worker process."""

from __future__ import annotations

import asyncio
import sys

import click

from contract import logs, settings


@click.command()
@click.option("--check", is_flag=True, help="Load the settings, say what would run, and exit.")
def command(check: bool) -> None:
    """Run a worker: pull windows from Kafka, keep the engine full, settle in Postgres.

    SIGTERM or Ctrl-C drains under worker.drain_timeout_s; a second one aborts.
    """
    loaded = settings.load()
    if check:
        click.echo(
            f"pool {loaded.worker.pool}, classes {', '.join(loaded.worker_classes)}, engine {loaded.engine.kind}, "
            f"{loaded.engine.max_requests} requests at once"
        )
        return
    logs.configure(loaded.log)
    from gpu_workers.worker import Worker

    sys.exit(asyncio.run(Worker(loaded).run()))
