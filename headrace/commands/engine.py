"""``headrace engine``: the model servers that workers start and leave running (``engine.http_serve``)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from contract import settings

if TYPE_CHECKING:
    from gpu_workers.engines.http_server import Record


@click.group()
def command() -> None:
    """Model servers beside the workers (engine.http_serve): list them, end them."""


@command.command()
def status() -> None:
    """Every server of engine.http_serve_folder: port, process id, log."""
    for record in _records(None):
        pid = record.running_pid()
        click.echo(f"port {record.port}: {f'process {pid}' if pid else 'ended'}, log {record.log}")


@command.command()
@click.option("--port", type=int, help="Only the server on this port. Default: all of engine.http_serve_folder.")
@click.option("--timeout", "timeout_s", default=30.0, show_default=True, help="Seconds until it is ended by force.")
def stop(port: int | None, timeout_s: float) -> None:
    """End the servers; no process of theirs is left. Stop the workers first, or they start them anew."""
    for record in _records(port):
        ended = record.end(timeout_s)
        click.echo(f"port {record.port}: {'ended' if ended else 'did not run'}")


def _records(port: int | None) -> list[Record]:
    from gpu_workers.engines import http_server

    folder = Path(settings.load().engine.http_serve_folder)
    found = [record for record in http_server.records(folder) if port in (None, record.port)]
    if not found:
        click.echo(f"no server was started from {folder}", err=True)
    return found
