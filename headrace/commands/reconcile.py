"""``headrace reconcile``."""

from __future__ import annotations

import dataclasses
import sys

import click

from contract import settings
from headrace.commands._output import json_line, open_store
from storage import reconcile


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object per finding.")
def command(as_json: bool) -> None:
    """Check that every ns and every dollar adds up; exit status 1 if not.

    First closes the books of workers that died. Then every identity of the ledger is checked in SQL, on one
    snapshot; workers may go on meanwhile.
    """
    loaded = settings.load()
    with open_store() as store:
        reaped = store.reap(loaded.worker.dead_after_s)
        findings = reconcile.reconcile(store)
    if as_json:
        for finding in findings:
            click.echo(json_line(dataclasses.asdict(finding)))
    else:
        for epoch in reaped:
            click.echo(f"worker epoch {epoch} is dead: its books are closed")
        for finding in findings:
            click.echo(str(finding))
        click.echo(f"{len(reconcile.CHECKS)} checks, {len(findings)} findings")
    if findings:
        sys.exit(1)
