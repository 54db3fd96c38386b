"""``headrace show``."""

from __future__ import annotations

import datetime as dt
import sys
from typing import Any

import click
import msgspec
import orjson

from contract.money import plain
from headrace.commands._output import cell, json_line, open_store, text_table
from storage.rows import ResultRow

_MOMENTS = ("appended_ms", "settled_ms")


@click.command()
@click.argument("id")
@click.option("--source", help="The publisher's name; default: of every source.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per result.")
def command(id: str, source: str | None, as_json: bool) -> None:
    """Everything known about one request.

    ID is the publisher's id or headrace's own key. Every generation is shown, the newest first, with the
    attempts behind it. Exit status 1: no result is stored; it may still be waiting.
    """
    with open_store() as store:
        found = [(row, store.attempts_of(row)) for row in store.find_result(id, source)]
    if not found:
        click.echo(f"no result is stored for {id!r}: it may still be waiting, or be too old to be kept", err=True)
        sys.exit(1)
    for row, attempts in found:
        fields = _fields(row)
        if as_json:
            click.echo(json_line(fields | {"attempts": attempts}))
            continue
        width = max(map(len, fields))
        shown = {name: value for name, value in fields.items() if value not in (None, "", False)}
        click.echo("\n".join(f"{name:{width}}  {cell(value)}" for name, value in shown.items()))
        if attempts:
            click.echo(f"\n{text_table(list(attempts[0]), [list(each.values()) for each in attempts])}")
        click.echo()


def _fields(row: ResultRow) -> dict[str, Any]:
    fields = msgspec.structs.asdict(row)
    for name in _MOMENTS:
        fields[name.replace("_ms", "_at")] = dt.datetime.fromtimestamp(fields.pop(name) / 1000, dt.UTC)
    fields["output"] = None if row.output is None else orjson.loads(row.output)
    fields["charge_usd"] = plain(row.charge_usd)
    return fields
