"""Keeps the engine full and turns what comes out of it into outcomes.

Lives on the event loop's thread; ``deliver``, ``released`` and ``hungry`` may be called from others. A
continuous engine is refilled request by request: each completion gives back a credit and the next
request enters at once. Nobody waits for a batch to finish, unless ``engine.closed_batches`` asks for it.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
import time
from collections.abc import Callable, Coroutine, Sequence
from decimal import Decimal
from typing import Any

from consumers.admission import invalid_outcomes
from consumers.crash import CrashPoint, Point
from consumers.in_hand import InHand
from consumers.item import Desk, Item, Lease, Outcome
from contract import logs
from contract.errors import EngineDied, InvalidRequest, TransientError
from contract.messages import dump_output
from contract.metrics import Metrics
from contract.money import Tariff, Usage
from contract.settings import Settings
from contract.statuses import Status, Waste
from gpu_workers.credits import Credits, Need
from gpu_workers.engine import Completion, Engine, EngineInfo, Job, Prepared
from gpu_workers.lanes import Lanes, Waiting
from gpu_workers.metering import Meter, weight
from gpu_workers.suspects import Suspects
from gpu_workers.timeouts import Timeouts
from storage.rows import AttemptRow

_PREPARE_CHUNK = 32
"""Requests tokenised at a time: the first of a large window reach the engine while the rest are prepared."""
_SOLO_AFTER_DEATHS = 2
"""A request that was in the engine at two deaths runs alone, so that its neighbours are not blamed."""


@dataclasses.dataclass(slots=True)
class _Flight:
    item: Item
    need: Need
    entered_ns: int
    started_ms: int
    stuck_at_ns: int
    cancelled_for: str = ""


_SCAN_EVERY_NS = 1_000_000_000
"""Between looks at all that waits: while the engine is full, nothing else would tell the late ones."""


def _runs_alone(item: Item) -> bool:
    return item.deaths >= _SOLO_AFTER_DEATHS


class Dispatcher:
    """Implements ``Listener``. One per worker.

    Args:
        settle: takes outcomes; any thread, must not block.
        tariff: prices an answer.
        wall_ms: wall clock, ms since the epoch; deadlines are judged by it.
    """

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        *,
        desk: Desk,
        in_hand: InHand,
        suspects: Suspects,
        meter: Meter,
        settle: Callable[[list[Outcome]], None],
        tariff: Tariff,
        metrics: Metrics,
        wall_ms: Callable[[], int] = lambda: int(time.time() * 1000),
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._desk = desk
        self._in_hand = in_hand
        self._suspects = suspects
        self._meter = meter
        self._settle = settle
        self._metrics = metrics
        self._wall_ms = wall_ms
        self._crash = CrashPoint(settings.worker.crash_at)
        self._timeouts = Timeouts(settings.engine)
        self._ranks = {name: cls.rank for name, cls in settings.worker_classes.items()}
        self._long_bucket = list(settings.buckets.edges)[-1] if len(settings.buckets.edges) > 1 else ""
        self._lanes = Lanes(settings.worker_classes)
        self._credits: Credits | None = None
        self._flights: dict[int, _Flight] = {}
        self._job_ids = itertools.count(1)
        self._attempt_seq = itertools.count(1)
        self._inbox: collections.deque[Waiting] = collections.deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake_asked = False
        self._purge_asked = False
        self._up = False
        self._draining = False
        self._solo = False
        self._closed_batches = settings.engine.closed_batches
        self._orphans: list[AttemptRow] = []
        self._model = ""
        self.tariff = tariff
        self._marking = False
        self._next_scan_ns = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._log = logs.get("gpu_workers")

    # -- any thread -------------------------------------------------------------------------------

    def deliver(self, items: list[Item]) -> None:
        """Prepares requests on the caller's thread and lets them wait for the engine."""
        size = len(items) if self._closed_batches else _PREPARE_CHUNK
        for start in range(0, len(items), size):
            chunk = items[start : start + size]
            ready: list[Waiting] = []
            refused: list[tuple[Item, InvalidRequest]] = []
            for item, prepared in zip(chunk, self._engine.prepare([item.request for item in chunk]), strict=True):
                if isinstance(prepared, InvalidRequest):
                    refused.append((item, prepared))
                    continue
                item.prepared = prepared
                route = item.lease.route
                need = Need(route.class_name, route.bucket == self._long_bucket, prepared.kv_tokens)
                ready.append(Waiting(item, need))
            self._inbox.extend(ready)
            if refused:
                self._settle(invalid_outcomes(self._desk, refused))
            self._ask_wake()

    def released(self, leases: Sequence[Lease]) -> None:
        """These leases no longer feed: what waits of them is dropped soon."""
        self._purge_asked = bool(leases) or self._purge_asked
        self._ask_wake()

    def hungry(self, class_name: str, bucket: str) -> bool:
        """Whether the engine would idle without more of this bucket right now. A closed batch is waited for.

        Asked per lane: long requests that wait for their share must not keep short ones waiting in a window.
        """
        long = bucket == self._long_bucket
        credits = self._credits
        return (
            self._up
            and not self._closed_batches
            and not self._inbox
            and self._lanes.is_empty(class_name, long=long)
            and (credits is not None and credits.admits(Need(class_name, long, 0), shorter_wait=False))
        )

    def _ask_wake(self) -> None:
        if not self._wake_asked and self._loop is not None:
            self._wake_asked = True
            self._loop.call_soon_threadsafe(self._wake)

    # -- life of the engine -----------------------------------------------------------------------

    def opened(self, info: EngineInfo) -> None:
        """The engine is up and warm: work may enter."""
        engine = self._settings.engine
        self._loop = asyncio.get_running_loop()
        self._model = info.model
        if self._credits is None:
            self._credits = Credits(
                self._settings.worker_classes,
                slots=info.max_requests,
                kv_tokens=engine.kv_tokens or info.kv_tokens,
                long_share=self._settings.buckets.long_share,
                long_share_alone=self._settings.buckets.long_share_alone,
                closed_batches=self._closed_batches,
            )
        self._up = True
        self._wake()

    def died(self, error: EngineDied) -> None:
        """Every request in the engine goes back to the front of its lane, in order; its time is waste."""
        if not self._up:
            return
        self._up = False
        self._solo = False
        flights = list(self._flights.items())
        now_ns = time.monotonic_ns()
        gone: list[Outcome] = []
        back: list[Waiting] = []
        for job_id, flight in flights:
            item = flight.item
            self._leave(job_id, flight, now_ns, Waste.ENGINE_DEATH, Usage())
            item.deaths += 1
            item.watched, item.marked = True, False
            if item.deaths >= self._settings.worker.max_engine_deaths:
                text = f"the engine died {item.deaths} times with this request in it: {error}"
                gone.append(
                    self._desk.outcome(
                        item, Status.FAILED, self._wall_ms(), code="engine_death", message=text, dead=True
                    )
                )
            else:
                back.append(Waiting(item, flight.need))
        self._lanes.put_back(back)
        self._spawn(self._suspects.note_deaths([waiting.item for waiting in back]))
        if gone:
            self._settle(gone)
        self._log.error("engine.died", error=str(error), in_flight=len(flights), given_up=len(gone))

    async def deaths_noted(self) -> None:
        """Waits until what is known of suspects is written down: only then may the engine be filled again, or left."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- filling ----------------------------------------------------------------------------------

    def _wake(self) -> None:
        self._wake_asked = False
        while self._inbox:
            self._lanes.add(self._inbox.popleft())
        if self._purge_asked:
            self._purge_asked = False
            self._drop_waiting(lambda item: not item.lease.feeding)
        self._pump()

    def _pump(self) -> None:
        if self._draining:
            self._drop_waiting()
            return
        if not self._up or (self._closed_batches and self._flights):
            return
        now_ns, now_ms = time.monotonic_ns(), self._wall_ms()
        jobs: list[Job] = []
        expired: list[Item] = []
        dropped: list[Item] = []
        while (waiting := self._next()) is not None:
            item = waiting.item
            if not item.lease.feeding:
                dropped.append(item)
            elif self._too_late(item, now_ms):
                expired.append(item)
            else:
                jobs.append(self._enter(waiting, now_ns, now_ms))
        if dropped:
            self._give_up(dropped)
        self._expire(expired, now_ms)
        if jobs:
            self._empty.clear()
            self._crash.reach(Point.BEFORE_ENGINE)
            self._engine.submit(jobs)

    def _expire(self, items: list[Item], now_ms: int) -> None:
        text = "it cannot finish before its deadline"
        if items:
            self._settle(
                [
                    self._desk.outcome(item, Status.EXPIRED, now_ms, code="deadline_exceeded", message=text)
                    for item in items
                ]
            )

    def _next(self) -> Waiting | None:
        """The next request that may enter, taken out of its lane; None: nobody may."""
        credits = self._credits
        if credits is None or self._solo:
            return None
        for class_name in credits.turn(self._lanes.classes()):
            lanes = self._lanes.by_age(class_name)
            for lane in lanes:
                head = lane[0]
                item = head.item
                if item.lease.feeding and not credits.admits(head.need, shorter_wait=len(lanes) > 1):
                    continue
                if item.lease.feeding and _runs_alone(item) and (credits.used or self._ask_mark([item])):
                    return None  # wait until the engine is empty and that is written down, then let it run alone
                if item.lease.feeding and item.watched and not _runs_alone(item):
                    free = itertools.islice(lane, credits.slots - credits.used)
                    if self._ask_mark([one.item for one in free if not _runs_alone(one.item)]):
                        continue
                lane.popleft()
                return head
        return None

    def _ask_mark(self, items: list[Item]) -> bool:
        """Whether the first of these must wait until it is written down that they are about to enter."""
        if not items[0].watched or items[0].marked:
            return False
        if not self._marking:
            self._marking = True
            self._spawn(self._mark([item for item in items if item.watched and not item.marked]))
        return True

    async def _mark(self, items: list[Item]) -> None:
        await self._suspects.mark(items)
        for item in items:
            item.marked = True
        self._marking = False
        self._pump()

    def _too_late(self, item: Item, now_ms: int) -> bool:
        if item.deadline_ms is None:
            return False
        prepared: Prepared = item.prepared
        least_ms = self._timeouts.least_s(prompt_tokens=prepared.prompt_tokens) * 1000
        return now_ms + least_ms > item.deadline_ms

    def _enter(self, waiting: Waiting, now_ns: int, now_ms: int) -> Job:
        item, need = waiting.item, waiting.need
        prepared: Prepared = item.prepared
        job_id = next(self._job_ids)
        assert self._credits is not None
        self._credits.take(need)
        self._solo = _runs_alone(item)
        choices = prepared.request.n
        limit_s = self._timeouts.inference_s(
            prompt_tokens=prepared.prompt_tokens, output_tokens=prepared.max_output_tokens * choices
        )
        self._flights[job_id] = _Flight(item, need, now_ns, now_ms, now_ns + int(limit_s * 1e9))
        self._meter.enter(job_id, weight(prepared.prompt_tokens, prepared.max_output_tokens, choices), now_ns)
        return Job(job_id, prepared, self._ranks[need.class_name])

    # -- emptying ---------------------------------------------------------------------------------

    def finished(self, completions: Sequence[Completion]) -> None:
        """Turns completions into outcomes or second tries, and refills."""
        now_ns = time.monotonic_ns()
        self._crash.reach(Point.AFTER_ENGINE)
        outcomes: list[Outcome] = []
        again: list[Waiting] = []
        dropped: list[Item] = []
        for completion in completions:
            flight = self._flights.get(completion.job_id)
            if flight is None:
                continue
            if flight.cancelled_for == "drain":
                self._leave(completion.job_id, flight, now_ns, Waste.ABORTED, completion.usage)
                dropped.append(flight.item)
                continue
            if flight.item.marked:
                flight.item.marked = False
                self._suspects.survived(flight.item)
            outcome = self._judge(completion, flight, now_ns)
            if outcome is None:
                again.append(Waiting(flight.item, flight.need))
            else:
                outcomes.append(outcome)
        if dropped:
            self._give_up(dropped)
        self._lanes.put_back(again)
        if outcomes:
            self._settle(outcomes)
        self._solo = self._solo and bool(self._flights)
        self._pump()
        if not self._flights:
            self._empty.set()

    def _judge(self, completion: Completion, flight: _Flight, now_ns: int) -> Outcome | None:
        """The outcome of an ended attempt; None: it is tried once more."""
        item, error = flight.item, completion.error
        now_ms = self._wall_ms()
        if error is None and not completion.cancelled:
            return self._answer(completion, flight, now_ns, now_ms)
        if isinstance(error, InvalidRequest):
            self._leave(completion.job_id, flight, now_ns, Waste.RETRY, completion.usage)
            return self._desk.invalid(item, error, now_ms)
        if flight.cancelled_for == "deadline":
            self._leave(completion.job_id, flight, now_ns, Waste.ABORTED, completion.usage)
            text = "its deadline passed while it ran"
            return self._desk.outcome(item, Status.EXPIRED, now_ms, code="deadline_exceeded", message=text)
        self._leave(completion.job_id, flight, now_ns, Waste.RETRY, completion.usage)
        item.tries += 1
        if item.tries < self._settings.worker.max_attempts:
            return None
        if flight.cancelled_for == "stuck":
            code, text = "inference_timeout", "it took longer than the inference timeout"
        else:
            code = error.code if isinstance(error, TransientError) else "engine_error"
            text = str(error)
        return self._desk.outcome(item, Status.FAILED, now_ms, code=code, message=text, dead=True)

    def _answer(self, completion: Completion, flight: _Flight, now_ns: int, now_ms: int) -> Outcome:
        item, usage = flight.item, completion.usage
        attempt = self._leave(completion.job_id, flight, now_ns, None, usage)
        charge = self.tariff.charge_usd(usage)
        attempt.charge_usd, attempt.tariff_id = charge, self.tariff.tariff_id
        outcome = self._desk.outcome(item, Status.OK, now_ms, model=self._model)
        row = outcome.row
        row.output, altered = dump_output({"choices": completion.choices})
        row.altered = row.altered or altered
        row.prompt_tokens, row.cached_tokens = usage.prompt_tokens, usage.cached_tokens
        row.output_tokens, row.usage_contradictory = usage.output_tokens, usage.contradictory
        row.charge_usd = charge
        row.queue_ms = max(0.0, flight.started_ms - item.appended_ms)
        row.inference_ms = (now_ns - flight.entered_ns) / 1e6
        self._timeouts.note(
            prompt_tokens=usage.computed_tokens, output_tokens=usage.output_tokens, seconds=row.inference_ms / 1e3
        )
        return outcome

    def _leave(self, job_id: int, flight: _Flight, now_ns: int, waste: Waste | None, usage: Usage) -> AttemptRow:
        """Gives the credit back and books the attempt's share of GPU time."""
        del self._flights[job_id]
        assert self._credits is not None
        self._credits.give_back(flight.need)
        share_ns = self._meter.leave(job_id, now_ns)
        attempt = AttemptRow(
            worker_epoch=self._desk.worker_epoch,
            seq=next(self._attempt_seq),
            number=len(flight.item.attempts) + 1,
            waste=waste,
            allocated_ns=share_ns,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens,
            started_ms=flight.started_ms,
            ended_ms=flight.started_ms + (now_ns - flight.entered_ns) // 1_000_000,
        )
        flight.item.attempts.append(attempt)
        return attempt

    # -- time -------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Cancels what ran past its deadline or its inference timeout. Called a few times a second."""
        now_ns, now_ms = time.monotonic_ns(), self._wall_ms()
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
        if late:
            self._engine.cancel(late)
        if now_ns >= self._next_scan_ns:
            self._next_scan_ns = now_ns + _SCAN_EVERY_NS
            self._expire(self._lanes.take_all(lambda item: self._too_late(item, now_ms)), now_ms)
        self._pump()
        for name in self._ranks:
            self._metrics.set("headrace_engine_requests", self._credits.held(name) if self._credits else 0, name)

    # -- the end ----------------------------------------------------------------------------------

    async def drain(self, deadline: float) -> None:
        """Drops what waits, lets what runs finish until ``deadline`` (monotonic s), then cuts it off."""
        self._draining = True
        self._wake()
        while self._flights and self._up:
            timeout_s = deadline - time.monotonic()
            if timeout_s <= 0:
                break
            self._empty.clear()
            try:
                await asyncio.wait_for(self._empty.wait(), timeout_s)
            except TimeoutError:
                break
        cut = list(self._flights.items())
        now_ns = time.monotonic_ns()
        for job_id, flight in cut:
            self._leave(job_id, flight, now_ns, Waste.ABORTED, Usage())
        if cut:
            self._engine.cancel([job_id for job_id, _ in cut])
            self._give_up([flight.item for _, flight in cut])
        self._drop_waiting()
        await self.deaths_noted()

    def _drop_waiting(self, chosen: Callable[[Item], bool] = lambda _: True) -> None:
        if items := self._lanes.take_all(chosen):
            self._give_up(items)

    def _give_up(self, items: list[Item]) -> None:
        """These leave without an outcome here. The GPU time they used is booked alone; marks are taken back."""
        if marked := [item for item in items if item.marked]:
            self._spawn(self._suspects.note_deaths(marked))
        for item in items:
            for attempt in item.attempts:
                attempt.waste = attempt.waste or Waste.ABORTED
                attempt.charge_usd, attempt.tariff_id = Decimal(0), None
                self._orphans.append(attempt)
            item.attempts = []
        self._in_hand.drop(items)

    def take_orphans(self) -> list[AttemptRow]:
        """Attempts without an outcome since the last call, for the ledger."""
        orphans, self._orphans = self._orphans, []
        return orphans
