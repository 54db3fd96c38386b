"""What is counted of a fault: the same ten numbers for each."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import signal
import statistics
from collections.abc import Collection, Sequence

import orjson

from gpu_workers.worker import EXIT_FENCED, EXIT_OK
from headrace.stack.processes import wait_for
from tests.acceptance.harness import World

_SETTLE_S = 60.0
_END_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One fault's account. The four that must be 0 are counts of requests."""

    name: str
    rounds: int
    requests: int
    """Acknowledged by the broker."""
    lost: int
    """No result in the table or none on the results topic, although the record's offset is committed."""
    doubled: int
    """More than one visible answer: rows of one generation, or unequal published ones."""
    double_charged: int
    """More than one attempt that somebody pays for, or an attempt that is waste and costs."""
    stuck: int
    """Record not committed, a minute after the last fault ended."""
    recovery_p50_s: float
    """From the fault (or its end, where the fault is an outage) until what waited then was settled; over rounds."""
    recovery_max_s: float
    wasted_gpu_s: float

    @property
    def sound(self) -> bool:
        return self.lost == self.doubled == self.double_charged == self.stuck == 0


def account(
    name: str, world: World, ids: Collection[str], recoveries_s: Sequence[float], *, rounds: int | None = None
) -> Row:
    """Waits until all is committed, ends the workers and counts. ``rounds``: default, one per recovery.

    Raises ``AssertionError`` when a worker ends badly or the ledger does not add up.
    """
    with contextlib.suppress(TimeoutError):  # counted below
        wait_for(lambda: world.lag() == 0, _SETTLE_S, "all committed")
    stuck = world.lag()
    running = [one for one in world.workers if one.child.running]
    for one in running:
        one.child.send(signal.SIGTERM)
    for one in running:
        assert one.child.wait(_END_S) in (EXIT_OK, EXIT_FENCED), one.child.tail()
    stored = collections.Counter(id for (id,) in world.query("SELECT id FROM results"))
    outputs: dict[tuple[str | None, int], set[bytes]] = {}
    for result in world.results():
        outputs.setdefault((result.id, result.generation), set()).add(orjson.dumps(result.output))
    published = {id for id, _ in outputs}
    missing = sum(1 for id in ids if id not in stored or id not in published)
    findings = world.reconcile()
    assert findings == [], [str(finding) for finding in findings[:5]]
    return Row(
        name=name,
        rounds=len(recoveries_s) if rounds is None else rounds,
        requests=len(ids),
        lost=max(0, missing - stuck),
        doubled=world.value(
            "SELECT count(*) FROM (SELECT FROM results GROUP BY key, generation HAVING count(*) > 1) twice"
        )
        + sum(1 for found in outputs.values() if len(found) > 1),
        double_charged=world.value(
            "SELECT count(*) FROM (SELECT FROM attempts WHERE waste IS NULL GROUP BY key, generation"
            " HAVING count(*) > 1) twice"
        )
        + world.value("SELECT count(*) FROM attempts WHERE waste IS NOT NULL AND charge_usd <> 0"),
        stuck=stuck,
        recovery_p50_s=round(statistics.median(recoveries_s), 2) if recoveries_s else 0.0,
        recovery_max_s=round(max(recoveries_s, default=0.0), 2),
        wasted_gpu_s=round(
            float(world.value("SELECT coalesce(sum(allocated_ns), 0) / 1e9 FROM attempts WHERE waste IS NOT NULL")), 2
        ),
    )


def sum_of(rows: Sequence[Row], *, rounds: int) -> Row:
    """One account of rounds that had a world each; recoveries are not kept."""
    counts = ("requests", "lost", "doubled", "double_charged", "stuck")
    return dataclasses.replace(
        rows[0],
        rounds=rounds,
        wasted_gpu_s=round(sum(row.wasted_gpu_s for row in rows), 2),
        **{name: sum(getattr(row, name) for row in rows) for name in counts},
    )
