"""``headrace dead list|show|replay``."""

from __future__ import annotations

import collections
import contextlib
import datetime as dt
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import click

from broker.publisher import Publisher
from consumers.dead_letters import DeadLetterView
from contract import logs, settings
from headrace.commands._output import Moment, cell, epoch_ms, json_line, text_table
from headrace.dead import DeadLetters, Filter, Replay

_MOST_ROWS = 1_000
_MOST_REFUSALS_SHOWN = 20
_NAME_WIDTH = 20


class _Place(click.ParamType[tuple[int, int]]):
    """Where a letter stands in the dead topic."""

    name = "place"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        partition, _, offset = str(value).partition("/")
        if not (partition.isdecimal() and offset.isdecimal() and len(partition) < 10 and len(offset) < 19):
            self.fail(f"{value!r} is no place such as 3/42 (partition/offset, see `headrace dead list`)", param, ctx)
        return int(partition), int(offset)


def _filters(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(
        [
            click.option("--reason", "reasons", multiple=True, help="Why it is here; may be given more than once."),
            click.option("--topic", "topics", multiple=True, help="The topic it came from; repeatable."),
            click.option("--id", "ids", multiple=True, help="The publisher's id; repeatable."),
            click.option("--key", "keys", multiple=True, help="headrace's key, or the record's own; repeatable."),
            click.option("--since", type=Moment(), help="Given up from this day or time on (UTC)."),
            click.option("--until", type=Moment(), help="Given up before this day or time."),
        ]
    ):
        command = option(command)
    return command


def _filter(
    reasons: tuple[str, ...],
    topics: tuple[str, ...],
    ids: tuple[str, ...],
    keys: tuple[str, ...],
    since: dt.datetime | None,
    until: dt.datetime | None,
) -> Filter:
    return Filter(
        frozenset(reasons), frozenset(topics), frozenset(ids), frozenset(keys), epoch_ms(since), epoch_ms(until)
    )


@contextlib.contextmanager
def _opened(loaded: settings.Settings) -> Iterator[DeadLetters]:
    logs.configure(loaded.log)
    with contextlib.closing(DeadLetters(loaded)) as dead:
        yield dead


@click.group()
def command() -> None:
    """Dead letters: list them, look at one, try them again.

    PLACE is where a letter stands in the dead topic: partition/offset, as `list` shows it.
    """


@command.command("list")
@_filters
@click.option("--json", "as_json", is_flag=True, help="One JSON object per letter, all of them.")
def list_(as_json: bool, **filters: Any) -> None:
    """List the dead letters that are there now, and count them by reason.

    The table ends after 1,000 letters, the count does not.
    """
    reasons: collections.Counter[str] = collections.Counter()
    rows: list[list[Any]] = []
    with _opened(settings.load()) as dead:
        for letter in dead.letters(_filter(**filters)):
            reasons[letter.reason] += 1
            if as_json:
                click.echo(json_line(_fields(letter)))
            elif len(rows) < _MOST_ROWS:
                rows.append(list(_row(letter).values()))
    if rows:
        click.echo(text_table(_COLUMNS, rows))
    if not as_json and reasons.total() > len(rows):
        click.echo(f"{reasons.total() - len(rows)} more; narrow it by a filter, or see --json", err=True)
    by_reason = ", ".join(f"{count} {cell(reason) or '(no reason)'}" for reason, count in reasons.most_common())
    click.echo(f"dead letters: {by_reason or 0}", err=True)


@command.command()
@click.argument("place", type=_Place())
@click.option("--payload", is_flag=True, help="The payload alone, byte by byte.")
def show(place: tuple[int, int], payload: bool) -> None:
    """Everything about one dead letter, its payload as it is.

    Exit status 1: no letter stands there.
    """
    with _opened(settings.load()) as dead:
        letter = dead.letter(*place)
        if letter is None:
            raise click.ClickException(_nothing(place))
        original = dead.original(letter) if letter.cut_bytes is not None else None
    cut = None
    if letter.cut_bytes is not None:
        how = "gone" if original is None else "still there"
        cut = f"the payload of {letter.cut_bytes} bytes was cut; the original {letter.origin or '(unknown)'} is {how}"
    if payload:
        if cut is not None and original is None:
            raise click.ClickException(cut)
        sys.stdout.buffer.write((original.value if original else letter.value) or b"")
        return
    for name, field in [*_fields(letter).items(), *((f"header {name}", _text(text)) for name, text in letter.headers)]:
        if field is not None:
            click.echo(f"{cell(name):{_NAME_WIDTH}}  {cell(field)}")
    text = cut or _text(letter.value)
    click.echo("\n" + "\n".join(map(cell, ("(no payload: a tombstone)" if text is None else text).split("\n"))))


@command.command()
@click.argument("places", metavar="[PLACE]...", nargs=-1, type=_Place())
@_filters
@click.option("--all", "everything", is_flag=True, help="All letters; needed where neither PLACE nor filter is given.")
@click.option("--limit", type=click.IntRange(1), help="So many at most.")
@click.option("--dry-run", is_flag=True, help="Publish nothing, tell what would be.")
def replay(
    places: tuple[tuple[int, int], ...], everything: bool, limit: int | None, dry_run: bool, **filters: Any
) -> None:
    """Publish dead letters again where they came from.

    Prints a line of JSON for each, once all in-sync copies have it. A request whose last outcome was a refusal
    is tried again; one that was answered since is answered from the store. Letters stay until retention takes
    them. Records without a readable request go only when named by PLACE. Exit status 1: some could not go.
    """
    wanted = _filter(**filters)
    if bool(places) + bool(wanted) + everything != 1:
        raise click.UsageError("give one of: PLACEs, filters, --all")
    loaded = settings.load()
    run = _Run()
    publisher = None if dry_run else Publisher(loaded)
    with _opened(loaded) as dead:
        replay = Replay(dead, publisher, replayed=run.replayed, refused=run.refused)
        letters = run.named(dead, places) if places else dead.letters(wanted)
        if publisher is None:
            replay.run(letters, named=bool(places), limit=limit)
        else:
            publisher.start()
            try:
                replay.run(letters, named=bool(places), limit=limit)
            finally:
                publisher.close(0)
    run.finish(replay.left_out, dry_run=dry_run)


class _Run:
    """Lines, counts and exit status of one replay."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._replayed = 0
        self._refused = 0

    def named(self, dead: DeadLetters, places: tuple[tuple[int, int], ...]) -> Iterator[DeadLetterView]:
        for place in places:
            letter = dead.letter(*place)
            if letter is None:
                self._refuse(_nothing(place))
            else:
                yield letter

    def replayed(self, letter: DeadLetterView) -> None:
        self._replayed += 1
        topic = letter.origin.topic if letter.origin else None
        id = letter.request.id if letter.request else None
        click.echo(json_line({"place": letter.place, "topic": topic, "id": id, "key": letter.request_key or None}))

    def refused(self, letter: DeadLetterView, why: str) -> None:
        self._refuse(f"{letter.place}: {why}")

    def _refuse(self, line: str) -> None:
        self._refused += 1
        if self._refused <= _MOST_REFUSALS_SHOWN:
            click.echo(cell(line), err=True)

    def finish(self, left_out: collections.Counter[str], *, dry_run: bool) -> None:
        done = "would be replayed" if dry_run else "replayed"
        counts = [f"{self._replayed} {done}", f"{self._refused} refused"]
        counts += [f"{count} left out ({why})" for why, count in left_out.items()]
        click.echo(f"{', '.join(counts)}; {time.monotonic() - self._started_s:.1f} s", err=True)
        if self._refused:
            sys.exit(1)


def _row(letter: DeadLetterView) -> dict[str, Any]:
    """One line of the table."""
    return {
        "place": letter.place,
        "at": dt.datetime.fromtimestamp(letter.at_ms / 1000, dt.UTC),
        "reason": letter.reason,
        "origin": letter.origin and str(letter.origin),
        "attempts": letter.attempts,
        "id": letter.request and letter.request.id,
        "size_bytes": letter.size_bytes,
    }


_COLUMNS = ("place", "at", "reason", "origin", "attempts", "id", "size_bytes")


def _fields(letter: DeadLetterView) -> dict[str, Any]:
    """Everything but headers and payload."""
    request = letter.request
    return _row(letter) | {
        "cut_bytes": letter.cut_bytes,
        "source": request.source if request else None,
        "key": letter.request_key or None,
        "record_key": _text(letter.key),
        "message": letter.message,
    }


def _nothing(place: tuple[int, int]) -> str:
    return f"{place[0]}/{place[1]}: no dead letter stands there (any more)"


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "backslashreplace")
