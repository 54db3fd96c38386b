"""The two bases side by side, down to the bill.

*Charge* is the tariff: what a tenant pays per token, predictable and quotable. *Allocated* is a share of
GPU time at the GPU's price: what it cost us. The lines of tenants and the lines that no tenant pays (each kind
of waste, idle time and so on) add up to the bill exactly: provisioned time × price.
"""

from __future__ import annotations

import dataclasses
from decimal import Decimal
from fractions import Fraction
from typing import Any

import sqlalchemy as sa

from contract.money import plain
from contract.statuses import Waste, WorkerState
from storage.reports import NOTHING, Amount, CostLine, Group, Period, TimeTotals, cost_lines, time_totals
from storage.store import Store

SHOWN_DIGITS = 12
"""Digits after the point in JSON: amounts of GPU time are no finite decimals."""
_UNPAID_STATES = tuple(state for state in WorkerState if state is not WorkerState.BUSY)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CostReport:
    """Cost of a period. Everything is exact; round where a person reads it."""

    by: Group
    lines: list[CostLine]
    unpaid: dict[str, Amount]
    """Lines that no tenant pays: kinds of waste, worker states, ``rounding``, ``in_flight``."""
    bill: Amount
    """Provisioned time at its price, measured apart from all lines."""

    @property
    def requests(self) -> int:
        return sum(line.requests for line in self.lines)

    @property
    def charge_usd(self) -> Fraction:
        return sum((Fraction(line.charge_usd) for line in self.lines), Fraction(0))

    @property
    def total(self) -> Amount:
        """All lines, tenants' and others. Equals ``bill`` on a sound ledger."""
        lines = [Amount(line.allocated_ns, line.allocated_usd) for line in self.lines]
        return sum([*lines, *self.unpaid.values()], NOTHING)

    def to_json(self) -> dict[str, Any]:
        """Plain values: money as decimal strings, time as integer ns."""
        return {
            "by": self.by,
            "lines": [
                {
                    "name": line.name,
                    "requests": line.requests,
                    "prompt_tokens": line.prompt_tokens,
                    "cached_tokens": line.cached_tokens,
                    "output_tokens": line.output_tokens,
                    "charge_usd": plain(line.charge_usd),
                    "allocated_ns": line.allocated_ns,
                    "allocated_usd": decimal_usd(line.allocated_usd),
                    "difference_usd": decimal_usd(line.difference_usd),
                }
                for line in self.lines
            ],
            "unpaid": {name: _amount_json(amount) for name, amount in self.unpaid.items()},
            "charge_usd": decimal_usd(self.charge_usd),
            "total": _amount_json(self.total),
            "bill": _amount_json(self.bill),
        }


def cost_report(store: Store, by: Group, since_ms: int | None = None, until_ms: int | None = None) -> CostReport:
    """The cost of a period by ``by``, from one snapshot. Raises ``FatalError`` when a kind of GPU has no price."""
    period = Period.of(since_ms, until_ms)

    def work(connection: sa.Connection) -> CostReport:
        lines, totals = cost_lines(connection, by, period), time_totals(connection, period)
        return CostReport(by=by, lines=lines, unpaid=_unpaid(totals), bill=totals.provisioned)

    return store.database.run(work, read_only=True)


def decimal_usd(amount: Fraction, digits: int = SHOWN_DIGITS) -> str:
    """An exact amount as a decimal string, rounded half to even at ``digits`` after the point."""
    return plain(Decimal(round(amount * 10**digits)).scaleb(-digits))


def _unpaid(totals: TimeTotals) -> dict[str, Amount]:
    lines: dict[str, Amount] = {waste.value: totals.waste[waste] for waste in Waste}
    lines |= {state.value: totals.states[state] for state in _UNPAID_STATES}
    return lines | {"rounding": totals.rounding, "in_flight": totals.in_flight}


def _amount_json(amount: Amount) -> dict[str, Any]:
    return {"ns": amount.ns, "usd": decimal_usd(amount.usd)}
