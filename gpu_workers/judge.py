"""What becomes of a request: from how its attempt ended, from its deadline, from deaths. Decides; starts nothing."""

from __future__ import annotations

from consumers.item import Desk, Item, Outcome
from contract.errors import EngineDied, InvalidRequest, TransientError
from contract.messages import dump_output
from contract.money import Tariff
from contract.settings import Worker
from contract.statuses import Status, Waste
from gpu_workers.engine import Completion, Prepared
from gpu_workers.flights import Flight, Flights
from gpu_workers.timeouts import Timeouts


class Judge:
    """Takes attempts out of ``flights`` and writes their outcomes.

    Args:
        tariff: prices an answer; may be replaced by a newer one.
    """

    def __init__(self, desk: Desk, *, flights: Flights, timeouts: Timeouts, tariff: Tariff, worker: Worker) -> None:
        self.tariff = tariff
        self.model = ""
        """Which model answers."""
        self._desk = desk
        self._flights = flights
        self._timeouts = timeouts
        self._worker = worker

    def outcome(self, completion: Completion, flight: Flight, now_ns: int, now_ms: int) -> Outcome | None:
        """The outcome of an ended attempt; None: it is tried once more."""
        item, error = flight.item, completion.error
        if error is None and not completion.cancelled:
            return self._answer(completion, flight, now_ns, now_ms)
        if isinstance(error, InvalidRequest):
            self._flights.leave(completion.job_id, now_ns, Waste.RETRY, completion.usage)
            return self._desk.invalid(item, error, now_ms)
        if flight.cancelled_for == "deadline":
            self._flights.leave(completion.job_id, now_ns, Waste.ABORTED, completion.usage)
            text = "its deadline passed while it ran"
            return self._desk.outcome(item, Status.EXPIRED, now_ms, code="deadline_exceeded", message=text)
        self._flights.leave(completion.job_id, now_ns, Waste.RETRY, completion.usage)
        item.tries += 1
        if item.tries < self._worker.max_attempts:
            return None
        if flight.cancelled_for == "stuck":
            code, text = "inference_timeout", "it took longer than the inference timeout"
        else:
            code = error.code if isinstance(error, TransientError) else "engine_error"
            text = str(error)
        return self._desk.outcome(item, Status.FAILED, now_ms, code=code, message=text, dead=True)

    def _answer(self, completion: Completion, flight: Flight, now_ns: int, now_ms: int) -> Outcome:
        item, usage = flight.item, completion.usage
        attempt = self._flights.leave(completion.job_id, now_ns, None, usage)
        charge = self.tariff.charge_usd(usage)
        attempt.charge_usd, attempt.tariff_id = charge, self.tariff.tariff_id
        outcome = self._desk.outcome(item, Status.OK, now_ms, model=self.model)
        row = outcome.row
        row.output, altered = dump_output({"choices": completion.choices})
        row.altered = row.altered or altered
        row.prompt_tokens, row.cached_tokens = usage.prompt_tokens, usage.cached_tokens
        row.output_tokens, row.usage_contradictory = usage.output_tokens, usage.contradictory
        row.charge_usd = charge
        row.queue_ms = max(0.0, flight.started_ms - item.appended_ms)
        row.inference_ms = round((now_ns - flight.entered_ns) / 1e6, 3)
        self._timeouts.note(
            prompt_tokens=usage.computed_tokens, output_tokens=usage.output_tokens, seconds=row.inference_ms / 1e3
        )
        return outcome

    def too_late(self, item: Item, now_ms: int) -> bool:
        """Whether it cannot finish before its deadline any more."""
        if item.deadline_ms is None:
            return False
        prepared: Prepared = item.prepared
        least_ms = self._timeouts.least_s(prompt_tokens=prepared.prompt_tokens) * 1000
        return now_ms + least_ms > item.deadline_ms

    def expired(self, item: Item, now_ms: int) -> Outcome:
        """The outcome of one that is too late."""
        text = "it cannot finish before its deadline"
        return self._desk.outcome(item, Status.EXPIRED, now_ms, code="deadline_exceeded", message=text)

    def died(self, item: Item, error: EngineDied, now_ms: int) -> Outcome | None:
        """Counts a death of the engine with this request in it: its outcome; None: it may enter again."""
        item.deaths += 1
        item.watched, item.marked = True, False
        if item.deaths < self._worker.max_engine_deaths:
            return None
        text = f"the engine died {item.deaths} times with this request in it: {error}"
        return self._desk.outcome(item, Status.FAILED, now_ms, code="engine_death", message=text, dead=True)
