"""``headrace submit``: requests from a file, standard input or the command line."""

from __future__ import annotations

import collections
import sys
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

import click
import orjson
import rich.console
import rich.progress

from contract import logs, messages, settings, statuses
from contract.errors import HeadraceError, InvalidRequest
from contract.messages import Request
from producers import lines
from producers.client import Client
from producers.prepare import Ticket

_MOST_AWAITED = 5_000
"""Results are fetched before more than this many are outstanding, so that a file of any size fits in memory."""
_MOST_ERRORS_SHOWN = 100
_SHOW_EVERY = 100


@click.command()
@click.argument("text", required=False)
@click.option("-f", "--file", type=click.File("rb"), help="Requests, one JSON object a line; - is standard input.")
@click.option("--pool", help="Which workers answer. Default: client.pool, or the pool that serves the model.")
@click.option("--class", "class_name", help="Priority class. Default: client.class_name.")
@click.option("--model", help="For requests that name no model.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="For requests that set no max_tokens.")
@click.option("--wait", is_flag=True, help="Print the results, one JSON object a line, in order of submission.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0), default=300.0, show_default=True,
              help="End the wait after so many seconds without a result.")  # fmt: skip
def command(
    text: str | None,
    file: BinaryIO | None,
    pool: str | None,
    class_name: str | None,
    model: str | None,
    max_tokens: int | None,
    wait: bool,
    timeout_s: float,
) -> None:
    """Publish requests from a file, from standard input or from the command line.

    Prints a ticket a line (with --wait: a result a line) on standard output; progress and the counts go to
    standard error. Exit status 1 if anything was refused or did not end as an answer.
    """
    loaded = settings.load()
    logs.configure(loaded.log)
    if text is not None and file is not None:
        raise click.UsageError("give a text or --file, not both")
    if text is None and file is None:
        if sys.stdin.isatty():
            raise click.UsageError("give a text, --file, or requests on standard input")
        file = sys.stdin.buffer
    run = _Run(fill={"model": model, "max_tokens": max_tokens}, timeout_s=timeout_s)
    requests = run.requests(file) if file is not None else iter([run.filled(Request(input=text))])
    with Client(loaded) as client, run.progress:
        tickets = client.submit_many(requests, pool=pool, class_name=class_name, reply=wait, on_error=run.refuse)
        if wait:
            run.print_results(client, tickets)
        else:
            run.print_tickets(tickets)
    run.finish(waited=wait)


class _Run:
    """Counts, progress and output of one call."""

    def __init__(self, fill: dict[str, Any], timeout_s: float) -> None:
        self._fill = {name: value for name, value in fill.items() if value is not None}
        self._timeout_s = timeout_s
        self._console = rich.console.Console(stderr=True)
        self.progress = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._submitting = self.progress.add_task("submitted", total=None)
        self._answering = self.progress.add_task("answered", total=None, visible=False)
        self._out = sys.stdout.buffer
        self._started_s = time.monotonic()
        self._moved_s = self._started_s
        self._open_lines: collections.deque[int] = collections.deque()
        self._submitted = 0
        self._refused = 0
        self._ended: collections.Counter[str] = collections.Counter()

    # -- input ------------------------------------------------------------------------------------

    def requests(self, file: BinaryIO) -> Iterator[Request]:
        """The requests of a file; lines that are none are told and counted."""
        for number, line in lines.read_lines(file):
            try:
                request = lines.parse_line(number, line)
            except InvalidRequest as error:
                self._tell_refused(str(error))
                continue
            self._open_lines.append(number)
            yield self.filled(request)

    def filled(self, request: Request) -> Request:
        """Options are for requests that leave the field open."""
        for name, value in self._fill.items():
            if getattr(request, name) is None:
                setattr(request, name, value)
        return request

    def refuse(self, index: int, error: HeadraceError) -> None:
        """One item was not submitted. If that is not its own fault, the next would fare the same: stop."""
        if not isinstance(error, InvalidRequest):
            raise error
        where = f"line {self._open_lines.popleft()}: " if self._open_lines else ""
        self._tell_refused(where + str(error).removeprefix(f"item {index}: "))

    def _tell_refused(self, message: str) -> None:
        self._refused += 1
        if self._refused <= _MOST_ERRORS_SHOWN:
            self._say(message)

    # -- output -----------------------------------------------------------------------------------

    def print_tickets(self, tickets: Iterator[Ticket]) -> None:
        """A ticket a line."""
        for ticket in self._counted(tickets):
            self._out.write(orjson.dumps(ticket._asdict()) + b"\n")
        self._out.flush()

    def print_results(self, client: Client, tickets: Iterator[Ticket]) -> None:
        """A result a line, in order of submission."""
        self.progress.update(self._answering, visible=True)
        waiting: collections.deque[Ticket] = collections.deque()
        for ticket in self._counted(tickets):
            waiting.append(ticket)
            if len(waiting) > _MOST_AWAITED:
                self._print_result(client, waiting.popleft())
        while waiting:
            self._print_result(client, waiting.popleft())

    def _counted(self, tickets: Iterator[Ticket]) -> Iterator[Ticket]:
        """Tickets come in the order of their lines, as refusals do: the oldest open line is this one's."""
        for ticket in tickets:
            if self._open_lines:
                self._open_lines.popleft()
            self._submitted += 1
            self._moved_s = time.monotonic()
            if self._submitted % _SHOW_EVERY == 0:
                self._show()
            yield ticket
        self._show()

    def _print_result(self, client: Client, ticket: Ticket) -> None:
        try:
            result = client.result(ticket, max(0.0, self._moved_s + self._timeout_s - time.monotonic()))
        except TimeoutError as error:
            self._ended["without result"] += 1
            if self._ended["without result"] <= _MOST_ERRORS_SHOWN:
                self._say(str(error))
            return
        self._moved_s = time.monotonic()
        self._ended[result.status] += 1
        self._show()
        self._out.write(messages.encode(result) + b"\n")
        self._out.flush()

    def _show(self) -> None:
        self.progress.update(self._submitting, completed=self._submitted)
        self.progress.update(self._answering, completed=sum(self._ended.values()), total=self._submitted)

    def _say(self, message: str) -> None:
        self._console.print(message, markup=False, highlight=False, soft_wrap=True)

    def finish(self, *, waited: bool) -> None:
        """The last line, and the exit status."""
        elapsed_s = max(1e-9, time.monotonic() - self._started_s)
        counts = [f"{self._submitted} submitted", f"{self._refused} refused"]
        counts += [f"{count} {how}" for how, count in sorted(self._ended.items())]
        click.echo(f"{', '.join(counts)}; {elapsed_s:.1f} s, {self._submitted / elapsed_s:.0f} requests/s", err=True)
        answered = sum(self._ended[status] for status in statuses.ANSWERS)
        if self._refused or (waited and answered < self._submitted):
            sys.exit(1)
