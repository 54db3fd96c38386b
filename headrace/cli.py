"""The command line. Commands are loaded when they are called: help and the client need no database, no engine."""

from __future__ import annotations

import dataclasses
import importlib
import os
from typing import Any

import click

from contract.errors import HeadraceError
from contract.settings import ENV_PREFIX

EXIT_ERROR = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A command as the help page knows it. ``help`` equals the first line of the command's own help (a test checks)."""

    help: str
    extra: str = ""
    """The extra of this package that brings what the command imports; empty: a plain install has it."""


COMMANDS = {
    "config": Entry("Settings: what they are, where they came from, what they mean."),
    "cost": Entry("What was spent, by business line, type, model or day.", "worker"),
    "dead": Entry("Dead letters: list them, look at one, try them again."),
    "demo": Entry("Everything on this machine: broker, database, model, worker, a mixed load, a report.", "dev,cpu"),
    "engine": Entry("Model servers beside the workers (engine.http_serve): list them, end them.", "worker"),
    "migrate": Entry("Bring the database to this version's tables.", "worker"),
    "reconcile": Entry("Check that every ns and every dollar adds up; exit status 1 if not.", "worker"),
    "results": Entry("Follow the results topic."),
    "schema": Entry("Print the JSON Schema of requests and results."),
    "show": Entry("Everything known about one request.", "worker"),
    "sql": Entry("Run one read-only statement, or list the tables.", "worker"),
    "stack": Entry("A broker and a database on this machine, without Docker.", "dev"),
    "submit": Entry("Publish requests from a file, from standard input or from the command line."),
    "topics": Entry("Create the topics, or check them against the settings."),
    "worker": Entry("Run a worker: pull windows from Kafka, keep the engine full, settle in Postgres.", "worker"),
}


class _Error(click.ClickException):
    exit_code = EXIT_ERROR


class LazyGroup(click.Group):
    """Loads ``headrace.commands.<name>`` when the command is called; turns our errors into one line and status 2."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = f"headrace.commands.{cmd_name}"
        try:
            command: click.Command = importlib.import_module(module).command
        except ModuleNotFoundError as error:
            raise _missing(cmd_name, error) from error
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except HeadraceError as error:
            raise _Error(str(error)) from error
        except ModuleNotFoundError as error:
            raise _missing(ctx.invoked_subcommand or "", error) from error


def _missing(name: str, error: ModuleNotFoundError) -> Exception:
    """What to install; the error itself where no extra would bring the module (then it is our bug)."""
    extra = COMMANDS[name].extra if name in COMMANDS else ""
    own = (error.name or "").partition(".")[0] in _OWN
    if own or not extra:
        return error
    return _Error(f"`headrace {name}` needs {error.name}: pip install 'headrace[{extra}]'")


_OWN = {"contract", "broker", "producers", "consumers", "gpu_workers", "storage", "monitoring", "jobs", "headrace"}


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--config",
    "config_file",
    type=click.Path(exists=True, dir_okay=False),
    help=f"Settings file. Default: ${ENV_PREFIX}CONFIG, else headrace.toml here if there is one.",
)
@click.version_option(package_name="headrace")
def main(config_file: str | None) -> None:
    """Message-queue-driven online and offline batch inference: Kafka in, vLLM in the middle, Postgres out."""
    if config_file:
        # Through the environment, so that processes a command starts read the same file.
        os.environ[f"{ENV_PREFIX}CONFIG"] = os.path.abspath(config_file)
