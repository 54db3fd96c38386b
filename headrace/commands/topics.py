"""``headrace topics create|check``."""

from __future__ import annotations

import sys

import click

from broker import topics
from contract import logs, settings


@click.group()
def command() -> None:
    """Create the topics, or check them against the settings."""
    logs.configure(settings.load().log)


@command.command()
def create() -> None:
    """Create the topics that are missing; those that are there are left as they are. Twice is harmless."""
    report = topics.ensure(settings.load())
    for name in report.created:
        click.echo(f"created {name}")
    click.echo(f"{len(report.created)} created, {len(report.existing)} there already")


@command.command()
def check() -> None:
    """Compare the topics with the settings; each difference with the command that mends it; exit status 1 if any."""
    found = topics.check(settings.load())
    for mismatch in found:
        click.echo(str(mismatch))
    if found:
        sys.exit(1)
    click.echo("all topics are as the settings ask")
