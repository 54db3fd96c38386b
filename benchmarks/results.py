"""What measurements leave behind: lines of JSON, one a name, and text between two markers of ``RESULTS.md``.

Several processes may write at the same time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("RESULTS.md")


def lines(file: Path) -> list[dict[str, Any]]:
    """The lines of ``file``; none when there is no such file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def keep(file: Path, *news: Mapping[str, Any]) -> None:
    """Adds lines to ``file``, each in place of the former one of its name."""
    names = {new["name"] for new in news}
    with _locked(file):
        kept = [old for old in lines(file) if old["name"] not in names]
        file.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in [*kept, *news]))


def put_between_markers(name: str, heading: str, text: str, file: Path = RESULTS) -> None:
    """Replaces what stands between the markers ``name`` of ``file``; without markers, adds them under ``heading``."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    with _locked(file):
        old = file.read_text() if file.exists() else "# Results\n"
        if begin not in old:
            old += f"\n## {heading}\n\n{begin}\n{end}\n"
        before, _, rest = old.partition(begin)
        file.write_text(f"{before}{begin}\n{text}{end}{rest.partition(end)[2]}")


def rows_between_markers(name: str, file: Path = RESULTS) -> dict[str, str]:
    """The rows of the table between the markers ``name``, by the name in their first cell, line ends included.

    A table is made anew from what this checkout measured and, for the rest, from these.
    """
    text = file.read_text() if file.exists() else ""
    table = text.partition(f"<!-- {name}: begin -->")[2].partition(f"<!-- {name}: end -->")[0]
    return {row.split("`")[1]: row for row in table.splitlines(keepends=True) if row.startswith("| `")}


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Holds the folder of ``file`` against other writers."""
    file.parent.mkdir(parents=True, exist_ok=True)
    held = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)
