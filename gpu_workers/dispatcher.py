"""Keeps the engine full and turns what comes out of it into outcomes.

Lives on the event loop's thread; ``deliver``, ``released`` and ``hungry`` may be called from others. A
continuous engine is refilled request by request: each completion gives back a credit and the next
request enters at once. Nobody waits for a batch to finish, unless ``engine.closed_batches`` asks for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from consumers.admission import invalid_outcomes
from consumers.crash import CrashPoint, Point
from consumers.in_hand import InHand
from consumers.item import Desk, Item, Lease, Outcome
from contract import logs
from contract.errors import EngineDied
from contract.metrics import Metrics
from contract.money import Tariff, Usage
from contract.settings import Settings
from contract.statuses import Waste
from gpu_workers.credits import Credits
from gpu_workers.engine import Completion, Engine, EngineInfo, Job
from gpu_workers.entrance import Entrance, runs_alone
from gpu_workers.flights import Flights, Orphans
from gpu_workers.judge import Judge
from gpu_workers.lanes import Waiting
from gpu_workers.metering import Meter
from gpu_workers.preparation import Preparation
from gpu_workers.suspects import Suspects
from gpu_workers.timeouts import Timeouts

_SCAN_EVERY_NS = 1_000_000_000
"""Between looks at all that waits: while the engine is full, nothing else would tell the late ones."""


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
        self._settle = settle
        self._metrics = metrics
        self._wall_ms = wall_ms
        self._crash = CrashPoint(settings.worker.crash_at)
        timeouts = Timeouts(settings.engine)
        self._ranks = {name: cls.rank for name, cls in settings.worker_classes.items()}
        self._preparation = Preparation(settings, engine)
        self._entrance = Entrance(settings.worker_classes, suspects=suspects, spawn=self._spawn, changed=self._pump)
        self._flights = Flights(desk.worker_epoch, meter=meter, timeouts=timeouts, ranks=self._ranks)
        self._judge = Judge(desk, flights=self._flights, timeouts=timeouts, tariff=tariff, worker=settings.worker)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake_asked = False
        self._purge_asked = False
        self._up = False
        self._draining = False
        self._closed_batches = settings.engine.closed_batches
        self.orphans = Orphans()
        self._next_scan_ns = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._log = logs.get("gpu_workers")

    # -- any thread -------------------------------------------------------------------------------

    def deliver(self, items: list[Item]) -> None:
        """Prepares requests on the caller's thread and lets them wait for the engine."""
        for ready, refused in self._preparation.chunks(items):
            self._entrance.put(ready)
            if refused:
                self._settle(invalid_outcomes(self._desk, refused))
            credits = self._flights.credits
            if credits is None or not credits.full:
                self._ask_wake()  # else whoever leaves next looks into the inbox

    def released(self, leases: Sequence[Lease]) -> None:
        """These leases no longer feed: what waits of them is dropped soon."""
        self._purge_asked = bool(leases) or self._purge_asked
        self._ask_wake()

    def hungry(self, class_name: str, bucket: str) -> bool:
        """Whether the engine would idle without more of this bucket right now. A closed batch is waited for.

        Asked per lane: long requests that wait for their share must not keep short ones waiting in a window.
        """
        long = self._preparation.is_long(bucket)
        return self._up and not self._closed_batches and self._entrance.is_hungry(class_name, long=long)

    def _ask_wake(self) -> None:
        if not self._wake_asked and self._loop is not None:
            self._wake_asked = True
            self._loop.call_soon_threadsafe(self._wake)

    # -- life of the engine -----------------------------------------------------------------------

    def opened(self, info: EngineInfo) -> None:
        """The engine is up and warm: work may enter."""
        engine = self._settings.engine
        self._loop = asyncio.get_running_loop()
        self._judge.model = info.model
        if self._flights.credits is None:
            self._flights.credits = self._entrance.credits = Credits(
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
        self._entrance.alone = False
        in_flight, now_ns = len(self._flights), time.monotonic_ns()
        gone: list[Outcome] = []
        back: list[Waiting] = []
        for job_id, flight in self._flights:
            self._flights.leave(job_id, now_ns, Waste.ENGINE_DEATH, Usage())
            if (outcome := self._judge.died(flight.item, error, self._wall_ms())) is not None:
                gone.append(outcome)
            else:
                back.append(Waiting(flight.item, flight.need))
        self._entrance.put_back(back)
        self._spawn(self._suspects.note_deaths([waiting.item for waiting in back]))
        if gone:
            self._settle(gone)
        self._log.error("engine.died", error=str(error), in_flight=in_flight, given_up=len(gone))

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
        while (waiting := self._entrance.next()) is not None:
            item = waiting.item
            if not item.lease.feeding:
                dropped.append(item)
            elif self._judge.too_late(item, now_ms):
                expired.append(item)
            else:
                self._entrance.alone = runs_alone(item)
                jobs.append(self._flights.enter(waiting, now_ns, now_ms))
        if dropped:
            self._give_up(dropped)
        self._expire(expired, now_ms)
        if jobs:
            self._empty.clear()
            self._crash.reach(Point.BEFORE_ENGINE)
            self._engine.submit(jobs)

    def _expire(self, items: list[Item], now_ms: int) -> None:
        if items:
            self._settle([self._judge.expired(item, now_ms) for item in items])

    # -- emptying ---------------------------------------------------------------------------------

    def finished(self, completions: Sequence[Completion]) -> None:
        """Turns completions into outcomes or second tries, and refills."""
        now_ns, now_ms = time.monotonic_ns(), self._wall_ms()
        self._crash.reach(Point.AFTER_ENGINE)
        outcomes: list[Outcome] = []
        again: list[Waiting] = []
        dropped: list[Item] = []
        for completion in completions:
            flight = self._flights.get(completion.job_id)
            if flight is None:
                continue
            if flight.cancelled_for == "drain":
                self._flights.leave(completion.job_id, now_ns, Waste.ABORTED, completion.usage)
                dropped.append(flight.item)
                continue
            if flight.item.marked:
                flight.item.marked = False
                self._suspects.survived(flight.item)
            outcome = self._judge.outcome(completion, flight, now_ns, now_ms)
            if outcome is None:
                again.append(Waiting(flight.item, flight.need))
            else:
                outcomes.append(outcome)
        if dropped:
            self._give_up(dropped)
        if again:
            self._entrance.put_back(again)
        if outcomes:
            self._settle(outcomes)
        self._entrance.alone = self._entrance.alone and bool(self._flights)
        self._pump()
        if not self._flights:
            self._empty.set()

    # -- time -------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Cancels what ran past its deadline or its inference timeout. Called a few times a second."""
        now_ns, now_ms = time.monotonic_ns(), self._wall_ms()
        late = self._flights.note_late(now_ns, now_ms)
        if late:
            self._engine.cancel(late)
        if now_ns >= self._next_scan_ns:
            self._next_scan_ns = now_ns + _SCAN_EVERY_NS
            self._expire(self._entrance.take_all(lambda item: self._judge.too_late(item, now_ms)), now_ms)
        self._pump()
        credits = self._flights.credits
        for name in self._ranks:
            self._metrics.set("headrace_engine_requests", credits.held(name) if credits else 0, name)

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
        cut = list(self._flights)
        now_ns = time.monotonic_ns()
        for job_id, _ in cut:
            self._flights.leave(job_id, now_ns, Waste.ABORTED, Usage())
        if cut:
            self._engine.cancel([job_id for job_id, _ in cut])
            self._give_up([flight.item for _, flight in cut])
        self._drop_waiting()
        await self.deaths_noted()

    def _drop_waiting(self, chosen: Callable[[Item], bool] = lambda _: True) -> None:
        if items := self._entrance.take_all(chosen):
            self._give_up(items)

    def _give_up(self, items: list[Item]) -> None:
        """These leave without an outcome here. The GPU time they used is booked alone; marks are taken back."""
        if marked := [item for item in items if item.marked]:
            self._spawn(self._suspects.note_deaths(marked))
        self.orphans.adopt(items)
        self._in_hand.drop(items)

    def price_by(self, tariff: Tariff) -> None:
        """Answers from now on are charged by ``tariff``."""
        self._judge.tariff = tariff
