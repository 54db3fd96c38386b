"""``headrace results``: results as JSON lines."""

from __future__ import annotations

import contextlib
import sys
from typing import Literal

import click

from contract import logs, messages, settings
from producers.client import Client


@click.command()
@click.option("--since", type=click.Choice(["earliest", "latest"]), help="Default: earliest, with --follow latest.")
@click.option("--group", help="Share the stream with others of this group and go on where it stopped.")
@click.option("--follow", is_flag=True, help="Wait for more until Ctrl-C.")
def command(since: Literal["earliest", "latest"] | None, group: str | None, follow: bool) -> None:
    """Follow the results topic.

    Prints one JSON object a line. Without --follow it ends where the topic ends now.
    """
    loaded = settings.load()
    logs.configure(loaded.log)
    start: Literal["earliest", "latest"] = since or ("latest" if follow else "earliest")
    out = sys.stdout.buffer
    with (
        Client(loaded) as client,
        contextlib.suppress(KeyboardInterrupt),
        contextlib.closing(client.results(start, group, follow=follow)) as results,
    ):
        for result in results:
            out.write(messages.encode(result) + b"\n")
            out.flush()
