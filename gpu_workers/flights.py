"""What is in the engine: its credits, its share of GPU time, and since when. No thread, no engine, no outcome."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal

import msgspec

from consumers.item import Item
from contract.money import Usage
from contract.statuses import Waste
from gpu_workers.credits import Credits, Need
from gpu_workers.engine import Job, Prepared
from gpu_workers.lanes import Waiting
from gpu_workers.metering import Meter, weight
from gpu_workers.timeouts import Timeouts
from storage.rows import AttemptRow


class Flight(msgspec.Struct):
    """One attempt that is under way."""

    item: Item
    need: Need
    entered_ns: int
    started_ms: int
    stuck_at_ns: int
    cancelled_for: str = ""
    """``deadline``, ``stuck`` or ``drain``; empty: it may go on."""


class Orphans:
    """Attempts that belong to no outcome: the GPU time they used is booked alone, as waste, and nobody pays."""

    def __init__(self) -> None:
        self._attempts: list[AttemptRow] = []

    def adopt(self, items: Iterable[Item]) -> None:
        """Takes the attempts away from requests that leave without an outcome."""
        for item in items:
            for attempt in item.attempts:
                attempt.waste = attempt.waste or Waste.ABORTED
                attempt.charge_usd, attempt.tariff_id = Decimal(0), None
                self._attempts.append(attempt)
            item.attempts = []

    def take(self) -> list[AttemptRow]:
        """Those since the last call, for the ledger."""
        attempts, self._attempts = self._attempts, []
        return attempts


class Flights:
    """Every job in the engine, by its id. Owned by the event loop."""

    def __init__(self, worker_epoch: int, *, meter: Meter, timeouts: Timeouts, ranks: Mapping[str, int]) -> None:
        self.credits: Credits | None = None
        """Known when the engine is up for the first time."""
        self._worker_epoch = worker_epoch
        self._meter = meter
        self._timeouts = timeouts
        self._ranks = ranks
        self._flights: dict[int, Flight] = {}
        self._job_ids = itertools.count(1)
        self._attempt_seq = itertools.count(1)

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[tuple[int, Flight]]:
        """A copy: they may leave while it is walked through."""
        return iter(list(self._flights.items()))

    def get(self, job_id: int) -> Flight | None:
        return self._flights.get(job_id)

    def enter(self, waiting: Waiting, now_ns: int, now_ms: int) -> Job:
        """Takes the credit; from here on its share of GPU time counts. ``credits.admits`` was asked before."""
        item, need = waiting.item, waiting.need
        prepared: Prepared = item.prepared
        job_id = next(self._job_ids)
        assert self.credits is not None
        self.credits.take(need)
        choices, prompt_tokens = prepared.request.n, prepared.prompt_tokens
        output_tokens = prepared.max_output_tokens
        limit_s = self._timeouts.inference_s(prompt_tokens=prompt_tokens, output_tokens=output_tokens * choices)
        self._flights[job_id] = Flight(item, need, now_ns, now_ms, now_ns + int(limit_s * 1e9))
        self._meter.enter(job_id, weight(prompt_tokens, output_tokens, choices), now_ns)
        return Job(job_id, prepared, self._ranks[need.class_name])

    def leave(self, job_id: int, now_ns: int, waste: Waste | None, usage: Usage) -> AttemptRow:
        """Gives the credit back and books the attempt's share of GPU time."""
        flight = self._flights.pop(job_id)
        assert self.credits is not None
        self.credits.give_back(flight.need)
        attempts = flight.item.attempts
        attempt = AttemptRow(
            worker_epoch=self._worker_epoch,
            seq=next(self._attempt_seq),
            number=len(attempts) + 1,
            waste=waste,
            allocated_ns=self._meter.leave(job_id, now_ns),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens,
            started_ms=flight.started_ms,
            ended_ms=flight.started_ms + (now_ns - flight.entered_ns) // 1_000_000,
        )
        attempts.append(attempt)
        return attempt

    def note_late(self, now_ns: int, now_ms: int) -> list[int]:
        """Jobs that have just run past their deadline or their inference timeout, marked as cancelled for it."""
        late = []
        for job_id, flight in self._flights.items():
            if flight.cancelled_for:
                continue
            deadline_ms = flight.item.deadline_ms
            if deadline_ms is not None and now_ms > deadline_ms:
                flight.cancelled_for = "deadline"
            elif now_ns > flight.stuck_at_ns:
                flight.cancelled_for = "stuck"
            else:
                continue
            late.append(job_id)
        return late
