"""From a window of records to requests that deserve the engine. One thread per priority class.

Order: decode and validate → expired out → duplicates answered from the store → the rest delivered. One
round trip to Postgres per window tells which keys are settled and leaves a claim. That is an
optimisation and a trace: while Postgres is away work goes on, and the unique key protects.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

from consumers.crash import CrashPoint, Point
from consumers.dead_letters import UNREADABLE
from consumers.identity import Judgement, judge
from consumers.in_hand import InHand
from consumers.intake import Batch
from consumers.item import Decoder, Desk, Item, Lease, Outcome
from contract import logs
from contract.errors import HeadraceError, InvalidRequest
from contract.metrics import Metrics
from contract.settings import Settings
from contract.statuses import Status
from storage.rows import Claim, Memory, ResultRow, Settled, Suspect
from storage.store import Store

_STORAGE_BACKOFF_S = 1.0
_MERGE_REQUESTS = 1_000
"""Windows that wait together share one round trip, up to this size."""


class Admission:
    """Admits windows of one class.

    Args:
        deliver: takes requests that may enter the engine, on this thread; may take its time.
        settle: takes outcomes; must not block.
        failed: told the error that ended the thread.
    """

    def __init__(
        self,
        settings: Settings,
        class_name: str,
        *,
        store: Store,
        desk: Desk,
        in_hand: InHand,
        deliver: Callable[[list[Item]], None],
        settle: Callable[[list[Outcome]], None],
        failed: Callable[[BaseException], None],
        metrics: Metrics,
    ) -> None:
        self._class_name = class_name
        self._store = store
        self._desk = desk
        self._in_hand = in_hand
        self._deliver = deliver
        self._settle = settle
        self._failed = failed
        self._metrics = metrics
        self._decoder = Decoder(settings)
        self._crash = CrashPoint(settings.worker.crash_at)
        self._max_deaths = settings.worker.max_engine_deaths
        self._horizon_ms = settings.postgres.key_horizon_days * 86_400_000
        self._queue: queue.SimpleQueue[Batch | Sequence[Lease] | None] = queue.SimpleQueue()
        self._ahead: list[Batch | Sequence[Lease] | None] = []
        self._skip_storage_until = 0.0
        self._log = logs.get("consumers").bind(class_name=class_name)
        self._thread = threading.Thread(target=self._run, name=f"admission-{class_name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, batch: Batch) -> None:
        """Takes a closed window; never blocks. What waits here is bounded by the intake's marks."""
        self._queue.put(batch)

    def forget(self, leases: Sequence[Lease]) -> None:
        """These partitions were given back in order: their claims are taken away. Never blocks."""
        self._queue.put(leases)

    def stop(self) -> None:
        """Ends the thread after what was put before."""
        self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (work := self._next()) is not None:
                if isinstance(work, Batch):
                    self.admit(work)
                else:
                    self._release_claims(work)
        except BaseException as error:  # noqa: BLE001 - a thread's end is never silent
            self._log.error("admission.failed", error=repr(error), exc_info=True)
            self._failed(error)

    def _next(self) -> Batch | Sequence[Lease] | None:
        """What to do next; windows that wait together become one. None: stop."""
        work = self._ahead.pop() if self._ahead else self._queue.get()
        while isinstance(work, Batch) and len(work.items) < _MERGE_REQUESTS and not self._queue.empty():
            following = self._queue.get()
            if not isinstance(following, Batch):
                self._ahead.append(following)
                break
            work = Batch(work.items + following.items, merged(work.claims, following.claims))
        return work

    def _release_claims(self, leases: Sequence[Lease]) -> None:
        try:
            self._store.release_claims(self._desk.worker_epoch, [(one.topic, one.partition) for one in leases])
        except HeadraceError as error:
            self._log.warning("admission.claims_not_released", error=str(error))

    def admit(self, batch: Batch) -> None:
        """One window, from records to deliveries and outcomes."""
        items = []
        for item in batch.items:
            if not item.lease.feeding:
                item.lease.drop()
                continue
            if not item.key:
                self._decoder.decode(item)
            items.append(item)
        leaders = self._in_hand.admit(items)
        now_ms = int(time.time() * 1000)
        outcomes: list[Outcome] = []
        known, suspects = self._look_up(batch.claims, leaders)
        self._crash.reach(Point.AFTER_CLAIM)
        fresh: list[Item] = []
        duplicates: list[tuple[Item, Settled]] = []
        for item in leaders:
            self._note_suspicion(item, suspects.get(item.key))
            settled = known.get(item.key)
            if settled is not None and judge(settled, item.record) is Judgement.DUPLICATE:
                duplicates.append((item, settled))
            elif (refusal := self._refuse(item, now_ms)) is not None:
                outcomes.append(refusal)
            else:
                fresh.append(item)
        if duplicates:
            outcomes += self._answer_from_store(duplicates, now_ms)
        if outcomes:
            self._settle(outcomes)
        if fresh:
            self._deliver(fresh)

    def _refuse(self, item: Item, now_ms: int) -> Outcome | None:
        if item.invalid is not None:
            dead = item.invalid.code in UNREADABLE
            return self._desk.invalid(item, item.invalid, now_ms, dead=dead)
        if now_ms - item.appended_ms > self._horizon_ms:
            text = "the record is older than the horizon of remembered keys"
            return self._desk.outcome(item, Status.EXPIRED, now_ms, code="too_old", message=text)
        if item.deaths >= self._max_deaths:
            text = f"engines died {item.deaths} times with this request in them, the last time alone"
            return self._desk.outcome(item, Status.FAILED, now_ms, code="engine_death", message=text, dead=True)
        if item.deadline_ms is not None and now_ms > item.deadline_ms:
            text = f"its deadline passed {now_ms - item.deadline_ms} ms before it could start"
            return self._desk.outcome(item, Status.EXPIRED, now_ms, code="deadline_exceeded", message=text)
        return None

    def _note_suspicion(self, item: Item, suspect: Suspect | None) -> None:
        """A request that was in an engine that died, or in the hands of a worker that died, is watched."""
        if suspect is not None:
            item.watched = True
            died_inside = suspect.worker_epoch not in (None, self._desk.worker_epoch)
            item.deaths = max(item.deaths, suspect.deaths + died_inside)
        elif item.lease.was_held(item.offset):
            item.watched = True
            item.deaths = max(item.deaths, 1)

    def _ask_held(self, items: Sequence[Item]) -> None:
        """Once per assignment: what earlier owners of its partition held when they died."""
        for lease in {item.lease for item in items if item.lease.held_before is None}:
            lease.held_before = self._store.open_claims(lease.topic, lease.partition, self._desk.worker_epoch)

    def _look_up(self, claims: Sequence[Claim], items: Sequence[Item]) -> Memory:
        if not items or time.monotonic() < self._skip_storage_until:
            return Memory({}, {})
        try:
            self._ask_held(items)
            return self._store.look_up(self._desk.worker_epoch, claims, [item.key for item in items])
        except HeadraceError as error:
            self._skip_storage_until = time.monotonic() + _STORAGE_BACKOFF_S
            self._log.warning("admission.look_up_skipped", error=str(error))
            return Memory({}, {})

    def _answer_from_store(self, duplicates: list[tuple[Item, Settled]], now_ms: int) -> list[Outcome]:
        self._metrics.count("headrace_duplicates_total", self._class_name, by=len(duplicates))
        try:
            stored = self._store.stored_results([item.key for item, _ in duplicates])
        except HeadraceError as error:
            # Known as duplicates, but their answers cannot be read now: settle them the long way, where
            # the unique key finds the stored row once Postgres is back.
            self._log.warning("admission.stored_results_unread", error=str(error))
            stored = {}
        outcomes = []
        for item, settled in duplicates:
            row = stored.get(item.key) or self._forgotten(item, settled, now_ms)
            outcomes.append(Outcome(item, row, dead_reason=_dead_reason(row), stored=True))
        return outcomes

    def _forgotten(self, item: Item, settled: Settled, now_ms: int) -> ResultRow:
        """The key is remembered, its result is no longer kept: the status stands, the output is gone."""
        text = f"this request was settled as {settled.status} on {settled.day}; its output is no longer kept"
        row = self._desk.outcome(item, settled.status, now_ms, code="output_not_kept", message=text).row
        row.generation = settled.generation
        return row


def _dead_reason(row: ResultRow) -> str | None:
    """Why a stored outcome is a dead letter too: its worker may have died before the letter was written."""
    dead = row.status is Status.FAILED or (row.status is Status.INVALID and row.error_code in UNREADABLE)
    return row.error_code if dead else None


def merged(first: Sequence[Claim], second: Sequence[Claim]) -> list[Claim]:
    """One claim per partition: the lower first offset, the higher last one."""
    claims = {(claim.topic, claim.partition): claim for claim in first}
    for claim in second:
        place = (claim.topic, claim.partition)
        if (old := claims.get(place)) is not None:
            claims[place] = Claim(
                *place, min(old.first_offset, claim.first_offset), max(old.last_offset, claim.last_offset)
            )
        else:
            claims[place] = claim
    return list(claims.values())


def invalid_outcomes(desk: Desk, refused: Sequence[tuple[Item, InvalidRequest]]) -> list[Outcome]:
    """Outcomes of requests that the engine's own checks refused."""
    now_ms = int(time.time() * 1000)
    return [desk.invalid(item, error, now_ms) for item, error in refused]
