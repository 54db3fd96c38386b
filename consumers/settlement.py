"""Makes outcomes durable: Postgres commit → results topic acknowledged → offset done, in this order.

One thread. Outcomes gather while the transaction before them runs; then one transaction takes them
all, the database's verdict says which row is visible, and that one is published. While records of one
settlement are on their way to the broker, the next transaction runs.

When Postgres is away the batch is kept and tried again; what gathers behind it is bounded by the
intakes' marks. A record that the broker refuses holds the intakes and is tried again until it goes.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import threading
import time
from collections.abc import Callable, Sequence

from broker import config
from broker.publisher import Failure, FailureKind, Publisher
from consumers.crash import CrashPoint, Point
from consumers.dead_letters import DeadLetter, dead_letter
from consumers.in_hand import InHand
from consumers.item import Headers, Item, Outcome
from contract import logs
from contract.errors import FatalError, HeadraceError, StorageDown
from contract.metrics import Metrics
from contract.routing import Header
from contract.settings import Settings
from storage.rows import ResultRow, Settlement, Verdict
from storage.store import Store

_IDLE_WAIT_S = 0.05
_ACK_WAIT_S = 0.005
_STORAGE_RETRY_S = (0.1, 0.2, 0.5, 1.0)
_REFUSED_RETRY_S = 1.0


class _Piece(enum.Enum):
    """The records one outcome sends."""

    RESULT = enum.auto()
    REPLY = enum.auto()
    DEAD = enum.auto()


@dataclasses.dataclass(slots=True, eq=False)
class _Pending:
    """An outcome that is committed and not yet acknowledged by the broker."""

    outcome: Outcome
    row: ResultRow
    left: int = 0
    stubbed: frozenset[_Piece] = frozenset()
    """Records that were too large with the output in them: a reference goes instead."""


_Token = tuple[_Pending, _Piece]


class Settler:
    """Takes outcomes from any thread; its own thread settles them.

    Args:
        hold / release: stop and restart the intakes, with a reason.
        failed: told the error that ended the thread (``Fenced`` among them).
    """

    def __init__(
        self,
        settings: Settings,
        *,
        store: Store,
        publisher: Publisher,
        in_hand: InHand,
        hold: Callable[[str], None],
        release: Callable[[str], None],
        failed: Callable[[BaseException], None],
        metrics: Metrics,
    ) -> None:
        self._store = store
        self._publisher = publisher
        self._in_hand = in_hand
        self._hold = hold
        self._release = release
        self._failed = failed
        self._metrics = metrics
        self._names = settings.names
        self._max_requests = settings.worker.settle_max_requests
        self._max_wait_s = settings.worker.settle_max_wait_ms / 1000
        self._dead_bytes = config.dead_message_bytes(settings)
        self._uncleared: list[str] = []
        self._crash = CrashPoint(settings.worker.crash_at)
        self._queue: collections.deque[Outcome] = collections.deque()
        self._ready = threading.Condition()
        self._waiting = False
        self._unacknowledged = 0
        self._refused: list[_Token] = []
        self._resent: set[_Token] = set()
        """Once refused and on their way again: the intakes hold until the broker has them all."""
        self._held = False
        self._retry_at = 0.0
        self._deadline: float | None = None
        self.storage_up = True
        self._log = logs.get("consumers")
        self._thread = threading.Thread(target=self._run, name="settlement", daemon=True)

    # -- any thread -------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def put(self, outcomes: Sequence[Outcome]) -> None:
        """Takes outcomes; never blocks."""
        self._queue.extend(outcomes)
        if self._waiting:
            with self._ready:
                self._ready.notify()

    def stop(self, deadline: float) -> None:
        """Settles what was put, until ``deadline`` (monotonic s); returns when the thread ended."""
        self._deadline = deadline
        with self._ready:
            self._ready.notify()
        if self._thread.ident is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()) + 5.0)

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._publisher.start()
            while not self._finished():
                self._run_once()
            self._publisher.close(0.0)
        except BaseException as error:  # noqa: BLE001 - a thread's end is never silent
            self._log.error("settlement.failed", error=repr(error), exc_info=True)
            self._failed(error)

    def _finished(self) -> bool:
        if self._deadline is None:
            return False
        done = not self._queue and not self._unacknowledged and not self._refused
        return done or time.monotonic() >= self._deadline

    def _run_once(self) -> None:
        if batch := self._gather():
            self._settle(batch)
        self._note_deliveries()
        self._send_refused_again()

    def _gather(self) -> list[Outcome]:
        """The next batch; empty when nothing came in time."""
        if not self._queue:
            with self._ready:
                self._waiting = True
                if not self._queue:
                    self._ready.wait(_ACK_WAIT_S if self._unacknowledged else _IDLE_WAIT_S)
                self._waiting = False
        if self._queue and len(self._queue) < self._max_requests and self._max_wait_s and self._deadline is None:
            time.sleep(self._max_wait_s)  # company: a transaction costs the same for one and for many
        count = min(len(self._queue), self._max_requests)
        return [self._queue.popleft() for _ in range(count)]

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
        for outcome, verdict in zip(fresh, verdicts, strict=True):
            outcome.row = verdict.result
            if verdict.won:
                self._count(outcome)
            else:
                outcome.dead_reason = None  # the winner's outcome stands, and its letter if it needs one
                self._metrics.count("headrace_duplicates_total", outcome.item.lease.route.class_name)
        self._crash.reach(Point.BEFORE_PUBLISH)
        for outcome in batch:
            self._publish(outcome)

    def _commit(self, rows: list[Settlement]) -> list[Verdict] | None:
        for attempt in range(10**9):
            try:
                verdicts = self._store.settle(rows)
            except StorageDown as error:
                self.storage_up = False
                self._metrics.set("headrace_storage_up", 0)
                self._log.warning("settlement.waits_for_postgres", requests=len(rows), error=str(error))
                pause_s = _STORAGE_RETRY_S[min(attempt, len(_STORAGE_RETRY_S) - 1)]
                resume_at = time.monotonic() + pause_s
                while time.monotonic() < resume_at:
                    self._note_deliveries()
                    time.sleep(0.02)
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
        self._uncleared += keys
        if not self._uncleared:
            return
        try:
            self._store.clear_suspects(self._uncleared)
            self._uncleared = []
        except HeadraceError as error:  # tried again with the next settlement
            self._log.warning("settlement.suspects_not_cleared", error=str(error))

    # -- publishing -------------------------------------------------------------------------------

    def _publish(self, outcome: Outcome) -> None:
        pending = _Pending(outcome, outcome.row)
        pieces = [_Piece.RESULT]
        if outcome.item.reply_to is not None:
            pieces.append(_Piece.REPLY)
        if outcome.dead_reason is not None:
            pieces.append(_Piece.DEAD)
        pending.left = len(pieces)
        value = outcome.row.to_result()
        for piece in pieces:
            self._send((pending, piece), value)

    def _send(self, token: _Token, value: bytes | None = None) -> None:
        pending, piece = token
        item, row = pending.outcome.item, pending.row
        self._unacknowledged += 1
        if piece is _Piece.DEAD:
            letter: DeadLetter = dead_letter(pending.outcome, self._dead_bytes)
            self._publisher.publish(self._names.dead, letter.key, letter.value, letter.headers, token=token)
            return
        if value is None:
            reference = f"results/{row.day}/{row.key}/{row.generation}"
            value = row.to_result(reference=reference if piece in pending.stubbed else None)
        headers: Headers = [(Header.KEY, row.key.encode()), (Header.STATUS, row.status.encode())]
        if piece is _Piece.RESULT:
            self._publisher.publish(self._names.results, row.key.encode(), value, headers, token=token)
        else:
            self._publisher.publish(
                self._names.replies, row.key.encode(), value, headers, partition=item.reply_to, token=token
            )

    def _note_deliveries(self) -> None:
        delivered, failures = self._publisher.poll()
        done: list[Item] = []
        for pending, _ in delivered:
            pending.left -= 1
            if not pending.left:
                done.append(pending.outcome.item)
        self._unacknowledged -= len(delivered) + len(failures)
        if done:
            self._crash.reach(Point.AFTER_PUBLISH)
            self._in_hand.complete(done)
        if self._resent:
            self._resent.difference_update(delivered, [failure.token for failure in failures])
        for failure in failures:
            self._on_failure(failure)
        if self._held and not self._refused and not self._resent:
            self._held = False
            self._release("publish")

    def _on_failure(self, failure: Failure) -> None:
        token: _Token = failure.token
        pending, piece = token
        if failure.kind is FailureKind.TOO_LARGE and piece is not _Piece.DEAD and piece not in pending.stubbed:
            pending.stubbed |= {piece}
            self._send(token)  # the answer is whole in Postgres; the record points to it
            return
        if failure.kind is FailureKind.FATAL:
            raise FatalError(f"the producer can deliver nothing any more: {failure.message}")
        self._log.error("settlement.refused", piece=piece.name, kind=failure.kind, error=failure.message)
        self._held = True
        self._hold("publish")
        self._refused.append(token)
        self._retry_at = time.monotonic() + _REFUSED_RETRY_S

    def _send_refused_again(self) -> None:
        if not self._refused or time.monotonic() < self._retry_at:
            return
        tokens, self._refused = self._refused, []
        self._resent.update(tokens)
        for token in tokens:
            self._send(token)

    def _count(self, outcome: Outcome) -> None:
        row = outcome.row
        place = (row.class_name, row.bucket)
        count, observe = self._metrics.count, self._metrics.observe
        count("headrace_requests_total", *place, row.status)
        observe("headrace_latency_seconds", row.latency_ms / 1e3, *place)
        if row.output_tokens or row.inference_ms:
            observe("headrace_queue_seconds", row.queue_ms / 1e3, *place)
            observe("headrace_inference_seconds", row.inference_ms / 1e3, *place)
            count("headrace_tokens_total", "prompt", by=row.prompt_tokens)
            count("headrace_tokens_total", "cached", by=row.cached_tokens)
            count("headrace_tokens_total", "output", by=row.output_tokens)
        if outcome.dead_reason is not None:
            count("headrace_dead_letters_total", outcome.dead_reason)
