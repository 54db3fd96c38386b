"""What people and dashboards ask: cost by group, where worker time went, latencies. Only reads.

Every report takes a period, ``since_ms`` inclusive to ``until_ms`` exclusive (ms since the epoch; None:
open). A request belongs to the moment it was settled, GPU time to the moment it ended. Amounts of
GPU time are ``Fraction``: an hour has 3.6 × 10¹² ns, which no decimal divides exactly.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal, get_args

import sqlalchemy as sa

from contract.errors import FatalError
from contract.money import NS_PER_HOUR
from contract.statuses import ANSWERS, Waste, WorkerState
from storage.rows import day_of
from storage.store import Store

Group = Literal["business_line", "type", "model", "day", "source", "class"]
GROUPS: tuple[Group, ...] = get_args(Group)
_FOREVER_MS = 253_402_300_799_999
"""The end of year 9999."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """From ``since_ms`` (inclusive) to ``until_ms`` (exclusive)."""

    since_ms: int
    until_ms: int

    @classmethod
    def of(cls, since_ms: int | None, until_ms: int | None) -> Period:
        return cls(since_ms=since_ms or 0, until_ms=_FOREVER_MS if until_ms is None else until_ms)

    def parameters(self) -> dict[str, Any]:
        return {
            "since": self.since_ms,
            "until": self.until_ms,
            "since_day": day_of(self.since_ms),
            "until_day": day_of(self.until_ms),
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CostLine:
    """What the requests of one group cost, on both bases. ``name`` None: the requests name none."""

    name: str | None
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    charge_usd: Decimal
    """By tariff: what the tenant pays."""
    allocated_ns: int
    allocated_usd: Fraction
    """Its share of GPU time at the price of the GPU: what it cost us."""

    @property
    def difference_usd(self) -> Fraction:
        """Charge less cost."""
        return Fraction(self.charge_usd) - self.allocated_usd


@dataclasses.dataclass(frozen=True, slots=True)
class Amount:
    """Engine time and what it cost."""

    ns: int
    usd: Fraction

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.ns + other.ns, self.usd + other.usd)

    def __sub__(self, other: Amount) -> Amount:
        return Amount(self.ns - other.ns, self.usd - other.usd)


NOTHING = Amount(0, Fraction(0))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TimeTotals:
    """Where the time of all workers went, and the part of it that attempts account for."""

    states: dict[WorkerState, Amount]
    rounding: Amount
    """The part of busy time that integer division gave to no attempt."""
    provisioned: Amount
    """The bill: measured from process start to heartbeat, not by adding states."""
    waste: dict[Waste, Amount]
    paid: Amount
    """Attempts that answered: their tenants' lines."""

    @property
    def in_flight(self) -> Amount:
        """Busy time of requests that were not settled yet, or were settled outside the period."""
        known = sum(self.waste.values(), self.paid + self.rounding)
        return self.states[WorkerState.BUSY] - known


@dataclasses.dataclass(frozen=True, slots=True)
class Percentiles:
    """Discrete percentiles: each is a value that occurred. Milliseconds."""

    p50: float
    p95: float
    p99: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LatencyLine:
    """One class and bucket. Rates are over the span from its first append to its last settlement."""

    class_name: str
    bucket: str
    count: int
    outcomes: dict[str, int]
    requests_per_s: float
    tokens_per_s: float
    queue_ms: Percentiles | None
    """Percentiles are of answered requests; None: there are none."""
    inference_ms: Percentiles | None
    latency_ms: Percentiles | None


def cost_by(store: Store, group: Group, since_ms: int | None = None, until_ms: int | None = None) -> list[CostLine]:
    """Cost of requests by ``group``. Raises ``FatalError`` when a kind of GPU has no price."""
    period = Period.of(since_ms, until_ms)
    return store.database.run(lambda connection: cost_lines(connection, group, period), read_only=True)


def worker_time_totals(store: Store, since_ms: int | None = None, until_ms: int | None = None) -> TimeTotals:
    """Where worker time went. Raises ``FatalError`` when a kind of GPU has no price."""
    period = Period.of(since_ms, until_ms)
    return store.database.run(lambda connection: time_totals(connection, period), read_only=True)


def latency_table(store: Store, since_ms: int | None = None, until_ms: int | None = None) -> list[LatencyLine]:
    """Counts, rates and percentiles per class and bucket."""
    parameters = Period.of(since_ms, until_ms).parameters()

    def work(connection: sa.Connection) -> list[LatencyLine]:
        return [_latency_line(row) for row in connection.execute(_LATENCIES, parameters)]

    return store.database.run(work, read_only=True)


# -- on an open connection, so that several share one snapshot --------------------------------------


def cost_lines(connection: sa.Connection, group: Group, period: Period) -> list[CostLine]:
    """See ``cost_by``."""
    _check_prices(connection)
    if group not in GROUPS:
        raise ValueError(f"group must be one of {', '.join(GROUPS)}, not {group!r}")
    of_result, of_attempt = (_SETTLED_DAY, "a.day") if group == "day" else (f"r.{group}", f"a.{group}")
    statement = sa.text(_COST_BY.format(of_result=of_result, of_attempt=of_attempt))
    return [
        CostLine(
            name=None if row.name is None else str(row.name),
            requests=int(row.requests),
            prompt_tokens=int(row.prompt_tokens),
            cached_tokens=int(row.cached_tokens),
            output_tokens=int(row.output_tokens),
            charge_usd=row.charge_usd,
            allocated_ns=int(row.allocated_ns),
            allocated_usd=_usd(row.allocated),
        )
        for row in connection.execute(statement, period.parameters())
    ]


def time_totals(connection: sa.Connection, period: Period) -> TimeTotals:
    """See ``worker_time_totals``."""
    _check_prices(connection)
    told = connection.execute(_TIME_TOLD, period.parameters()).one()
    rest = connection.execute(_TIME_UNTOLD, period.parameters()).one()
    states: dict[WorkerState, Amount] = {
        state: Amount(int(told._mapping[f"{state}_ns"]), _usd(told._mapping[state]))
        for state in WorkerState
        if state is not WorkerState.LOST
    }
    all_told = sum(states.values(), NOTHING)
    states[WorkerState.LOST] = Amount(int(rest.lost_ns), _usd(rest.lost))
    waste = dict.fromkeys(Waste, NOTHING)
    paid = NOTHING
    for row in connection.execute(_ATTEMPT_TIME, period.parameters()):
        amount = Amount(int(row.ns), _usd(row.amount))
        if row.waste is None:
            paid = amount
        else:
            waste[Waste(row.waste)] = amount
    return TimeTotals(
        states=states,
        rounding=Amount(int(told.rounding_ns), _usd(told.rounding)),
        provisioned=all_told + Amount(int(rest.untold_ns), _usd(rest.untold)),
        waste=waste,
        paid=paid,
    )


def _check_prices(connection: sa.Connection) -> None:
    """Unknown is not zero: time without a price would look free."""
    kinds = connection.execute(_UNPRICED).scalars().all()
    if kinds:
        raise FatalError(
            f"no price for GPU kind {', '.join(kinds)} when its first worker started; add one that begins before that:"
            " headrace cost price add"
        )


def _usd(ns_times_usd_per_hour: Decimal) -> Fraction:
    return Fraction(ns_times_usd_per_hour) / NS_PER_HOUR


def _latency_line(row: sa.Row[Any]) -> LatencyLine:
    span_s = max(row.span_ms, 1) / 1000
    queue, inference, latency = (
        None if values is None else Percentiles(*values) for values in (row.queue, row.inference, row.latency)
    )
    return LatencyLine(
        class_name=row.class_name,
        bucket=row.bucket,
        count=row.requests,
        outcomes=row.outcomes,
        requests_per_s=row.requests / span_s,
        tokens_per_s=int(row.tokens) / span_s,
        queue_ms=queue,
        inference_ms=inference,
        latency_ms=latency,
    )


def day_start_ms(day: dt.date) -> int:
    """The first ms of a UTC day, for periods."""
    return int(dt.datetime.combine(day, dt.time(), dt.UTC).timestamp()) * 1000


_SETTLED_DAY = "(to_timestamp(r.settled_ms / 1000.0) AT TIME ZONE 'UTC')::date"

PRICES = """
    prices AS (
        SELECT gpu_kind, usd_per_hour, floor(extract(epoch FROM valid_from) * 1000)::bigint AS from_ms,
               coalesce(floor(extract(epoch FROM lead(valid_from) OVER kind) * 1000)::bigint, 9223372036854775807)
               AS until_ms
        FROM gpu_prices WINDOW kind AS (PARTITION BY gpu_kind ORDER BY valid_from)
    )
"""
"""Each price with the period in which it holds."""

_PRICED = "JOIN prices p ON p.gpu_kind = w.gpu_kind AND {at} >= p.from_ms AND {at} < p.until_ms"

_UNPRICED = sa.text("""
    SELECT gpu_kind FROM workers w GROUP BY gpu_kind
    HAVING min(started_ms) < coalesce((SELECT floor(extract(epoch FROM min(valid_from)) * 1000)
                                       FROM gpu_prices p WHERE p.gpu_kind = w.gpu_kind), 9223372036854775807)
    ORDER BY gpu_kind
""")

_COST_BY = f"""
    WITH {PRICES},
    asked AS (
        SELECT {{of_result}} AS name, count(*) AS requests, sum(prompt_tokens) AS prompt_tokens,
               sum(cached_tokens) AS cached_tokens, sum(output_tokens) AS output_tokens,
               sum(charge_usd) AS charge_usd, 0 AS allocated_ns, 0 AS allocated
        FROM results r WHERE settled_ms >= :since AND settled_ms < :until GROUP BY 1
    ),
    used AS (
        SELECT {{of_attempt}} AS name, 0, 0, 0, 0, 0, sum(a.allocated_ns), sum(a.allocated_ns * p.usd_per_hour)
        FROM attempts a JOIN workers w ON w.epoch = a.worker_epoch {_PRICED.format(at="a.ended_ms")}
        WHERE a.waste IS NULL AND a.ended_ms >= :since AND a.ended_ms < :until
          AND a.day BETWEEN :since_day AND :until_day
        GROUP BY 1
    )
    SELECT name, sum(requests) AS requests, sum(prompt_tokens) AS prompt_tokens, sum(cached_tokens) AS cached_tokens,
           sum(output_tokens) AS output_tokens, sum(charge_usd) AS charge_usd, sum(allocated_ns) AS allocated_ns,
           sum(allocated) AS allocated
    FROM (SELECT * FROM asked UNION ALL SELECT * FROM used) AS both_bases
    GROUP BY name ORDER BY name NULLS LAST
"""

_STATES = [state for state in WorkerState if state is not WorkerState.LOST]
_TOLD_SUMS = ", ".join(
    f"coalesce(sum(t.{name}_ns), 0) AS {name}_ns, coalesce(sum(t.{name}_ns * p.usd_per_hour), 0) AS {name}"
    for name in (*_STATES, "rounding")
)
_TIME_TOLD = sa.text(f"""
    WITH {PRICES}
    SELECT {_TOLD_SUMS}
    FROM worker_time t JOIN workers w ON w.epoch = t.worker_epoch {_PRICED.format(at="t.at_ms")}
    WHERE t.at_ms >= :since AND t.at_ms < :until
""")

_TIME_UNTOLD = sa.text(f"""
    WITH {PRICES},
    told AS (
        SELECT w.gpu_kind, w.lost_ns, coalesce(max(t.at_ms), w.started_ms) AS last_ms,
               w.provisioned_ns
               - coalesce(sum({" + ".join(f"t.{state}_ns" for state in _STATES)}), 0) AS untold_ns
        FROM workers w LEFT JOIN worker_time t ON t.worker_epoch = w.epoch GROUP BY w.epoch
    )
    SELECT coalesce(sum(w.lost_ns), 0) AS lost_ns, coalesce(sum(w.lost_ns * p.usd_per_hour), 0) AS lost,
           coalesce(sum(w.untold_ns), 0) AS untold_ns, coalesce(sum(w.untold_ns * p.usd_per_hour), 0) AS untold
    FROM told w {_PRICED.format(at="w.last_ms")}
    WHERE w.last_ms >= :since AND w.last_ms < :until
""")
"""Lost time as it was booked, and provisioned time that no row tells: equal on a sound database."""

_ATTEMPT_TIME = sa.text(f"""
    WITH {PRICES}
    SELECT a.waste, sum(a.allocated_ns) AS ns, sum(a.allocated_ns * p.usd_per_hour) AS amount
    FROM attempts a JOIN workers w ON w.epoch = a.worker_epoch {_PRICED.format(at="a.ended_ms")}
    WHERE a.ended_ms >= :since AND a.ended_ms < :until AND a.day BETWEEN :since_day AND :until_day
    GROUP BY a.waste
""")

_ANSWERED = "FILTER (WHERE status IN (" + ", ".join(f"'{status}'" for status in sorted(ANSWERS)) + "))"
_PERCENTILES = ", ".join(
    f"percentile_disc(ARRAY[0.5, 0.95, 0.99]) WITHIN GROUP (ORDER BY {name}_ms) {_ANSWERED} AS {name}"
    for name in ("queue", "inference", "latency")
)
_LATENCIES = sa.text(f"""
    WITH chosen AS (SELECT * FROM results WHERE settled_ms >= :since AND settled_ms < :until),
    outcomes AS (
        SELECT class, bucket, json_object_agg(status, n ORDER BY status) AS outcomes
        FROM (SELECT class, bucket, status, count(*) AS n FROM chosen GROUP BY class, bucket, status) AS counted
        GROUP BY class, bucket
    ),
    figures AS (
        SELECT class, bucket, count(*) AS requests, sum(prompt_tokens + output_tokens) AS tokens,
               max(settled_ms) - min(appended_ms) AS span_ms, {_PERCENTILES}
        FROM chosen GROUP BY class, bucket
    )
    SELECT f.class AS class_name, f.*, o.outcomes FROM figures f JOIN outcomes o USING (class, bucket)
    ORDER BY f.class, f.bucket
""")
