"""``headrace schema``."""

from __future__ import annotations

import click
import orjson

from contract import messages


@click.command()
def command() -> None:
    """Print the JSON Schema of requests and results."""
    click.echo(orjson.dumps(messages.schemas(), option=orjson.OPT_INDENT_2).decode())
