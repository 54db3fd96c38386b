"""What commands that show stored things share: an open store, tables as plain text, moments.

Loads no database driver before ``open_store`` is called.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import click
import orjson

from contract import settings

if TYPE_CHECKING:
    from storage.store import Store

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


@contextlib.contextmanager
def open_store() -> Iterator[Store]:
    """The store of the settings. Raises ``StorageDown`` at once when it does not answer: a person is waiting."""
    from storage.store import Store

    postgres = settings.load().postgres
    store = Store(postgres)
    try:
        store.ping(postgres.connect_timeout_s)
        yield store
    finally:
        store.close()


def text_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Aligned columns; numbers to the right. None is an empty cell, other values as in ``cell``."""
    cells = [list(columns), *([cell(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    right = [all(row[i] is None or _is_number(row[i]) for row in rows) for i in range(len(columns))]
    lines = [
        "  ".join(
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def cell(value: Any) -> str:
    """One value on one line, as safe text for a terminal."""
    if value is None:
        return ""
    if isinstance(value, (dict, list)):
        value = orjson.dumps(value, default=str).decode()
    if isinstance(value, dt.datetime):
        value = value.isoformat(sep=" ", timespec="milliseconds")
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", str(value))


def json_line(value: Any) -> str:
    """A value as one line of JSON; what JSON lacks (dates, exact decimals) as strings."""
    return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


class Moment(click.ParamType[dt.datetime]):
    """A day or a time, UTC unless it says otherwise: ``2026-03-01``, ``2026-03-01T12:30:00+02:00``."""

    name = "moment"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dt.datetime:
        if isinstance(value, dt.datetime):
            return value
        try:
            moment = dt.datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"{value!r} is no day or time such as 2026-03-01 or 2026-03-01T12:30:00Z", param, ctx)
        return moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)


def epoch_ms(moment: dt.datetime | None) -> int | None:
    """Milliseconds since the epoch; None stays None."""
    return None if moment is None else int(moment.timestamp() * 1000)


def _is_number(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value) and value.lstrip("-").replace(".", "", 1).replace(",", "").isdigit()
    return isinstance(value, (int, float, Decimal)) and not isinstance(value, bool)
