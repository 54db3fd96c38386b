"""A figure: the median of its runs against its target, as a line of JSON and as a row of the table. Pure."""

from __future__ import annotations

import dataclasses
import operator
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_BOUND = re.compile(r"([≥≤><])\s*(-?[\d.]+)")
_RANGE = re.compile(r"(-?[\d.]+)\s*–\s*(-?[\d.]+)")
_HOLDS = {"≥": operator.ge, "≤": operator.le, ">": operator.gt, "<": operator.lt}
_WORDS = {True: "yes", False: "**no**", None: ""}


@dataclasses.dataclass(frozen=True, slots=True)
class Goal:
    """A figure before it is measured.

    ``target`` begins with a bound (``≥ 0.6``, ``0.95–1.05``) or is a word (``report``); what follows a semicolon
    is for the reader.
    """

    name: str
    what: str
    unit: str
    target: str = "report"

    def holds(self, value: float) -> bool | None:
        """None: there is nothing to hold."""
        promise = self.target.partition(";")[0].strip()
        if found := _BOUND.fullmatch(promise):
            return bool(_HOLDS[found[1]](value, float(found[2])))
        if found := _RANGE.fullmatch(promise):
            return float(found[1]) <= value <= float(found[2])
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """One line of ``build/bench.jsonl``. ``value`` is the median of ``runs``."""

    name: str
    value: float
    unit: str
    target: str
    holds: bool | None
    runs: tuple[float, ...]

    @classmethod
    def of(cls, goal: Goal, runs: Sequence[float]) -> Figure:
        value = statistics.median(runs)
        return cls(goal.name, _short(value), goal.unit, goal.target, goal.holds(value), tuple(map(_short, runs)))

    def line(self) -> dict[str, Any]:
        """Values for a line of JSON."""
        return dataclasses.asdict(self)


def table(goals: Sequence[Goal], lines: Iterable[Mapping[str, Any]], former: Mapping[str, str]) -> str:
    """The table of RESULTS.md, in the order of ``goals``: rows of ``lines``, else the ``former`` ones (by name)."""
    rows = dict(former)
    whats = {goal.name: goal.what for goal in goals}
    for line in lines:
        name = str(line["name"])
        rows[name] = (
            f"| `{name}` | {whats.get(name, '')} | {line['value']:,} {line['unit']} | {line['target']} "
            f"| {_WORDS[line['holds']]} | {', '.join(f'{run:,}' for run in line['runs'])} |\n"
        )
    head = "| figure | what | value | target | holds | runs |\n|---|---|--:|---|---|---|\n"
    return head + "".join(rows[name] for name in whats if name in rows)


def _short(value: float) -> float:
    """Three digits that count; whole from 100 on."""
    if abs(value) >= 100:
        return round(value)
    return float(f"{value:.3g}")
