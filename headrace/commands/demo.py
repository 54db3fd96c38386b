"""``headrace demo``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from headrace.demo.load import Sizes

_DEFAULT = Sizes()


@click.command()
@click.option(
    "--once", is_flag=True, help="End after the load; exit status 1 if anything was lost, doubled or unreconciled."
)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(".headrace/demo"),
    show_default=True,
    help="Data of broker and database, model, logs. Emptied at the start.",
)
@click.option(
    "--offline", "offline_requests", type=click.IntRange(min=0), default=_DEFAULT.offline_requests,
    envvar="HEADRACE_DEMO_OFFLINE", show_default=True, show_envvar=True, help="Requests of the offline file.",
)  # fmt: skip
@click.option(
    "--online-s", type=click.FloatRange(min=0), default=_DEFAULT.online_s,
    envvar="HEADRACE_DEMO_ONLINE_S", show_default=True, show_envvar=True, help="Seconds of online load.",
)  # fmt: skip
@click.option(
    "--online-per-s", type=click.FloatRange(min=0, min_open=True), default=_DEFAULT.online_per_s,
    envvar="HEADRACE_DEMO_ONLINE_PER_S", show_default=True, show_envvar=True, help="Mean online requests a second.",
)  # fmt: skip
def command(once: bool, folder: Path, offline_requests: int, online_s: float, online_per_s: float) -> None:
    """Everything on this machine: broker, database, model, worker, a mixed load, a report.

    A broker, a database or a model that the settings name is used instead of one made here:
    HEADRACE_KAFKA__BOOTSTRAP_SERVERS, HEADRACE_POSTGRES__URL, HEADRACE_ENGINE__MODEL_PATH. Without --once a light
    load goes on until Ctrl-C.
    """
    from headrace.demo.run import run

    sizes = Sizes(online_s=online_s, online_per_s=online_per_s, offline_requests=offline_requests)
    sys.exit(run(sizes, folder, once=once))
