"""``headrace stack up``."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path

import click

from headrace.stack import processes
from headrace.stack.machine import Machine


@click.group()
def command() -> None:
    """A broker and a database on this machine, without Docker."""


@command.command()
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(".headrace/stack"),
    show_default=True,
    help="Where their data stays.",
)
def up(folder: Path) -> None:
    """Broker, database, topics and tables; prints what to export; runs until Ctrl-C."""
    processes.interrupt_on_signals()
    try:
        with Machine(folder) as machine:
            prepare(machine)
            for name, value in machine.environment.items():
                click.echo(f"export {name}={shlex.quote(value)}")
            click.echo("# ready; Ctrl-C stops it", err=True)
            signal.pause()
    except KeyboardInterrupt:
        click.echo("# stopped", err=True)


def prepare(machine: Machine) -> None:
    """Tables and topics on the machine's servers; twice is harmless."""
    from broker import topics
    from storage import migrations

    current = machine.settings()
    migrations.upgrade(current.postgres.url)
    topics.ensure(current)
