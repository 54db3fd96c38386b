"""``headrace sql``."""

from __future__ import annotations

import click

from headrace.commands._output import json_line, open_store, text_table
from storage import query


@click.command()
@click.argument("statement", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per row.")
@click.option("--max-rows", default=1_000, show_default=True, type=click.IntRange(1, 10_000_000), help="Rows at most.")
@click.option("--timeout-s", default=60.0, show_default=True, type=click.FloatRange(0.1, 86_400), help="Seconds.")
def command(statement: str | None, as_json: bool, max_rows: int, timeout_s: float) -> None:
    """Run one read-only statement, or list the tables.

    For example: headrace sql "SELECT status, count(*) FROM results GROUP BY status"
    """
    with open_store() as store:
        if statement is None:
            answer = query.tables(store)
        else:
            answer = query.run(store, statement, timeout_s=timeout_s, max_rows=max_rows)
    if as_json:
        for row in answer.rows:
            click.echo(json_line(dict(zip(answer.columns, row, strict=True))))
    elif answer.columns:
        click.echo(text_table(answer.columns, answer.rows))
    if answer.more:
        click.echo(f"more than {max_rows} rows; see --max-rows", err=True)
