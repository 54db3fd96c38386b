"""What a person sees while the demo runs. On a terminal it moves; elsewhere it is a line now and then."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from headrace.demo.load import OFFLINE, ONLINE
from headrace.demo.tally import Tally

WIDTH = 132
"""Of output that is no terminal: the tables' own."""
_LINE_EVERY_S = 10.0
_RECENT_S = 30.0


def console() -> Console:
    """A console as wide as the terminal, or as the tables."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=WIDTH)


@contextlib.contextmanager
def step(out: Console, what: str) -> Iterator[None]:
    """Says what is being done, and at the end how long it took."""
    started_s = time.monotonic()
    with out.status(what):
        yield
    out.print(f"{what} [dim]{time.monotonic() - started_s:.1f} s[/]")


class LoadScreen:
    """Progress of the load: published and settled per class, and the lag. ``with``, then ``update`` at will."""

    def __init__(self, out: Console, tally: Tally) -> None:
        self._out = out
        self._tally = tally
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[note]}[/]"),
            console=out,
            disable=not out.is_terminal,
        )
        self._tasks = {
            (class_name, verb): self._progress.add_task(f"{class_name} {verb}", total=None, note="")
            for class_name in (ONLINE, OFFLINE)
            for verb in ("published", "settled")
        }
        self._began_s = time.monotonic()
        self._line_s = self._began_s

    def __enter__(self) -> LoadScreen:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.update()
        self._progress.stop()

    def update(self) -> None:
        """Shows the counts as they are now."""
        notes = []
        for class_name, counts in self._tally.counts.items():
            rate = counts.settled / max(time.monotonic() - self._began_s, 0.001)
            lag = f"lag {counts.open:,}" + (f" ({counts.open / rate:.0f} s)" if rate and counts.open else "")
            for verb, done in (("published", counts.published), ("settled", counts.settled)):
                note = lag if verb == "settled" else ""
                total = max(counts.planned, counts.published)
                self._progress.update(self._tasks[class_name, verb], completed=done, total=total, note=note)
            notes.append(f"{class_name}: {counts.published:,} published, {counts.settled:,} settled, {lag}")
        now_s = time.monotonic()
        if self._progress.disable and now_s - self._line_s >= _LINE_EVERY_S:
            self._line_s = now_s
            self._out.print(f"  after {now_s - self._began_s:.0f} s: {'; '.join(notes)}")


class LiveScreen:
    """A table that moves, until Ctrl-C. Only on a terminal."""

    def __init__(self, out: Console, tally: Tally) -> None:
        self._out = out
        self._tally = tally
        self._live = Live(console=out, auto_refresh=False, transient=True)

    def __enter__(self) -> LiveScreen:
        if self._out.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def update(self) -> None:
        """Shows the figures as they are now."""
        if self._out.is_terminal:
            self._live.update(self._table(), refresh=True)

    def _table(self) -> Table:
        table = Table(title=f"Light load, last {_RECENT_S:.0f} s; Ctrl-C stops", title_justify="left")
        table.add_column("class")
        for name in ("published", "settled", "lag", "answers/s", "P50 ms", "P95 ms"):
            table.add_column(name, justify="right")
        now_s = time.monotonic()
        recent = [one for one in self._tally.recent.copy() if now_s - one.at_s <= _RECENT_S]
        for class_name, counts in self._tally.counts.items():
            latencies = sorted(one.latency_ms for one in recent if one.class_name == class_name)
            p50 = f"{statistics.median(latencies):,.0f}" if latencies else "-"
            p95 = f"{latencies[int(len(latencies) * 0.95)]:,.0f}" if latencies else "-"
            rate = f"{len(latencies) / _RECENT_S:.1f}"
            table.add_row(
                class_name, f"{counts.published:,}", f"{counts.settled:,}", f"{counts.open:,}", rate, p50, p95
            )
        return table
