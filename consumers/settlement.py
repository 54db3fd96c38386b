"""Makes outcomes durable: Postgres commit → results topic acknowledged → offset done, in this order.

The first step. Outcomes gather while the transaction before them runs; then one transaction takes them all,
the database's verdict says which row is visible, and that one goes to be published (``publishing``, a
thread of its own) while the next transaction runs.

Two threads do this side by side: one prepares its rows while Postgres works on the other's, and a few
online outcomes do not stand behind a large offline transaction. The order between two settlements means
nothing: a key is in hand once, and offsets go by the lowest unfinished record.

When Postgres is away the batches are kept and tried again; what gathers behind it is bounded by the
intakes' marks.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Sequence

from consumers.crash import CrashPoint, Point
from consumers.item import Outcome
from consumers.outcome_queue import OutcomeQueue
from contract import logs
from contract.errors import HeadraceError, StorageDown
from contract.metrics import Metrics
from contract.settings import Settings
from storage.rows import ResultRow, Settlement, Verdict
from storage.store import Store

_IDLE_WAIT_S = 0.05
_STORAGE_RETRY_S = (0.1, 0.2, 0.5, 1.0)


class Settler:
    """Takes outcomes from any thread; its own threads settle them.

    Args:
        publish: takes outcomes that are durable, on a settlement thread; must not block.
        failed: told the error that ended a thread (``Fenced`` among them).
    """

    def __init__(
        self,
        settings: Settings,
        *,
        store: Store,
        publish: Callable[[list[Outcome]], None],
        failed: Callable[[BaseException], None],
        metrics: Metrics,
    ) -> None:
        self._store = store
        self._publish = publish
        self._failed = failed
        self._metrics = metrics
        self._max_requests = settings.worker.settle_max_requests
        self._max_wait_s = settings.worker.settle_max_wait_ms / 1000
        self._uncleared: collections.deque[str] = collections.deque()
        self._crash = CrashPoint(settings.worker.crash_at)
        self._queue = OutcomeQueue()
        self._deadline: float | None = None
        self.storage_up = True
        self._log = logs.get("consumers")
        self._threads = [
            threading.Thread(target=self._run, name=f"settlement-{number}", daemon=True)
            for number in range(settings.worker.settlers)
        ]

    # -- any thread -------------------------------------------------------------------------------

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def put(self, outcomes: Sequence[Outcome]) -> None:
        """Takes outcomes; never blocks."""
        self._queue.put(outcomes)

    def stop(self, deadline: float) -> None:
        """Settles what was put, until ``deadline`` (monotonic s); returns when the threads ended."""
        self._deadline = deadline
        self._queue.wake()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()) + 5.0)

    # -- the threads ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._finished():
                if batch := self._gather():
                    self._settle(batch)
        except BaseException as error:  # noqa: BLE001 - a thread's end is never silent
            self._log.error("settlement.failed", error=repr(error), exc_info=True)
            self._failed(error)

    def _finished(self) -> bool:
        return self._deadline is not None and (not self._queue or time.monotonic() >= self._deadline)

    def _gather(self) -> list[Outcome]:
        """The next batch; empty when nothing came in time."""
        self._queue.wait(_IDLE_WAIT_S)
        if self._queue and len(self._queue) < self._max_requests and self._max_wait_s and self._deadline is None:
            time.sleep(self._max_wait_s)  # company: a transaction costs the same for one and for many
        return self._queue.take(self._max_requests)

    def _settle(self, batch: list[Outcome]) -> None:
        now_ms = int(time.time() * 1000)
        fresh = [outcome for outcome in batch if not outcome.stored]
        for outcome in fresh:
            outcome.row.settled_ms = now_ms
            outcome.row.latency_ms = max(0, now_ms - outcome.row.appended_ms)
        rows = [Settlement(outcome.row, outcome.item.attempts) for outcome in fresh]
        started_s = time.monotonic()
        self._crash.reach(Point.BEFORE_COMMIT)
        verdicts = self._commit(rows) if rows else []
        if verdicts is None:
            return  # told to stop while Postgres was away: the records stay uncommitted
        self._metrics.observe("headrace_settle_seconds", time.monotonic() - started_s)
        self._metrics.observe("headrace_settle_requests", len(batch))
        self._crash.reach(Point.AFTER_COMMIT)
        self._clear_suspects([outcome.row.key for outcome in fresh if outcome.item.watched])
        won: list[Outcome] = []
        for outcome, verdict in zip(fresh, verdicts, strict=True):
            outcome.row = verdict.result
            if verdict.won:
                won.append(outcome)
            else:
                outcome.dead_reason = None  # the winner's outcome stands, and its letter if it needs one
                self._metrics.count("headrace_duplicates_total", outcome.item.lease.route.class_name)
        self._publish(batch)
        self._count(won)

    def _commit(self, rows: list[Settlement]) -> list[Verdict] | None:
        for attempt in range(10**9):
            try:
                verdicts = self._store.settle(rows)
            except StorageDown as error:
                self.storage_up = False
                self._metrics.set("headrace_storage_up", 0)
                self._log.warning("settlement.waits_for_postgres", requests=len(rows), error=str(error))
                pause_s = _STORAGE_RETRY_S[min(attempt, len(_STORAGE_RETRY_S) - 1)]
                time.sleep(pause_s)
                if self._deadline is not None and time.monotonic() >= self._deadline:
                    return None
            else:
                if not self.storage_up:
                    self.storage_up = True
                    self._metrics.set("headrace_storage_up", 1)
                    self._log.info("settlement.postgres_back", requests=len(rows))
                return verdicts
        raise AssertionError("unreachable")

    def _clear_suspects(self, keys: list[str]) -> None:
        while self._uncleared:
            keys.append(self._uncleared.pop())
        if not keys:
            return
        try:
            self._store.clear_suspects(keys)
        except HeadraceError as error:  # tried again with the next settlement
            self._uncleared.extend(keys)
            self._log.warning("settlement.suspects_not_cleared", error=str(error))

    def _count(self, outcomes: list[Outcome]) -> None:
        """Counts per place, not per request: a metric costs more than the look at a row."""
        places: dict[tuple[str, str], list[ResultRow]] = {}
        for outcome in outcomes:
            row = outcome.row
            places.setdefault((row.class_name, row.bucket), []).append(row)
            if outcome.dead_reason is not None:
                self._metrics.count("headrace_dead_letters_total", outcome.dead_reason)
        count, observe = self._metrics.count, self._metrics.observe_all
        for place, rows in places.items():
            for status, number in collections.Counter([row.status for row in rows]).items():
                count("headrace_requests_total", *place, status, by=number)
            observe("headrace_latency_seconds", [row.latency_ms / 1e3 for row in rows], *place)
            ran = [row for row in rows if row.output_tokens or row.inference_ms]
            observe("headrace_queue_seconds", [row.queue_ms / 1e3 for row in ran], *place)
            observe("headrace_inference_seconds", [row.inference_ms / 1e3 for row in ran], *place)
            count("headrace_tokens_total", "prompt", by=sum([row.prompt_tokens for row in ran]))
            count("headrace_tokens_total", "cached", by=sum([row.cached_tokens for row in ran]))
            count("headrace_tokens_total", "output", by=sum([row.output_tokens for row in ran]))
