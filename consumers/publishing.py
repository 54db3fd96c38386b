"""Publishes committed outcomes, and lets their offsets go when the broker has acknowledged them.

One thread beside settlement's: while the records of one transaction are on their way, the next one
commits. Each turn sends what gathered as one burst and flushes it, so that the client fills its requests
however short the burst, and nothing lingers.

A record that the broker refuses holds the intakes and is tried again until it goes. What gathers here is
bounded by the intakes' marks.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from broker import config
from broker.publisher import Failure, FailureKind, Publisher
from consumers.crash import CrashPoint, Point
from consumers.dead_letters import dead_letter
from consumers.in_hand import InHand
from consumers.item import Headers, Item, Outcome
from consumers.outcome_queue import OutcomeQueue
from contract import logs
from contract.errors import FatalError
from contract.routing import Header
from contract.settings import Settings

LINGER_MS = 20
"""Longer than a burst takes to hand over; the flush behind it ends it early."""
_IDLE_WAIT_S = 0.05
_FLUSH_S = 0.02
"""One slow partition holds the next burst back this long, not longer."""
_REFUSED_RETRY_S = 1.0


class _Piece(enum.Enum):
    """The records one outcome sends."""

    RESULT = enum.auto()
    REPLY = enum.auto()
    DEAD = enum.auto()


class _Record(msgspec.Struct, eq=False):
    """A record on its way to the broker."""

    outcome: Outcome
    piece: _Piece
    stubbed: bool = False
    """It was too large with the output in it: a reference goes instead."""


class Publishing:
    """Takes committed outcomes from any thread; its own thread publishes them.

    Args:
        hold / release: stop and restart the intakes, with a reason.
        failed: told the error that ended the thread.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        publisher: Publisher,
        in_hand: InHand,
        hold: Callable[[str], None],
        release: Callable[[str], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._publisher = publisher
        self._in_hand = in_hand
        self._hold = hold
        self._release = release
        self._failed = failed
        self._names = settings.names
        self._dead_bytes = config.dead_message_bytes(settings)
        self._crash = CrashPoint(settings.worker.crash_at)
        self._queue = OutcomeQueue()
        self._unacknowledged = 0
        self._refused: list[_Record] = []
        self._resent: set[_Record] = set()
        """Once refused and on their way again: the intakes hold until the broker has them all."""
        self._held = False
        self._retry_at = 0.0
        self._deadline: float | None = None
        self._log = logs.get("consumers")
        self._thread = threading.Thread(target=self._run, name="publishing", daemon=True)

    # -- any thread -------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def put(self, outcomes: Sequence[Outcome]) -> None:
        """Takes outcomes that are durable; never blocks."""
        self._queue.put(outcomes)

    def stop(self, deadline: float) -> None:
        """Publishes what was put, until ``deadline`` (monotonic s); returns when the thread ended."""
        self._deadline = deadline
        self._queue.wake()
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
            self._log.error("publishing.failed", error=repr(error), exc_info=True)
            self._failed(error)

    def _finished(self) -> bool:
        if self._deadline is None:
            return False
        done = not self._queue and not self._unacknowledged and not self._refused
        return done or time.monotonic() >= self._deadline

    def _run_once(self) -> None:
        if batch := self._gather():
            self._crash.reach(Point.BEFORE_PUBLISH)
            for outcome in batch:
                self._publish(outcome)
        if self._unacknowledged:
            self._publisher.flush(_FLUSH_S)
            self._note_deliveries()
        self._send_refused_again()

    def _gather(self) -> list[Outcome]:
        """What is to be sent; waits for it only while nothing is on its way."""
        if not self._unacknowledged:
            self._queue.wait(_IDLE_WAIT_S)
        return self._queue.take(len(self._queue))

    def _publish(self, outcome: Outcome) -> None:
        pieces = [_Piece.RESULT]
        if outcome.item.reply_to is not None:
            pieces.append(_Piece.REPLY)
        if outcome.dead_reason is not None:
            pieces.append(_Piece.DEAD)
        outcome.records_left = len(pieces)
        value = outcome.row.to_result()
        for piece in pieces:
            self._send(_Record(outcome, piece), value)

    def _send(self, record: _Record, value: bytes | None = None) -> None:
        item, row, piece = record.outcome.item, record.outcome.row, record.piece
        self._unacknowledged += 1
        if piece is _Piece.DEAD:
            letter = dead_letter(record.outcome, self._dead_bytes)
            self._publisher.publish(self._names.dead, letter.key, letter.value, letter.headers, token=record)
            return
        if value is None:
            reference = f"results/{row.day}/{row.key}/{row.generation}"
            value = row.to_result(reference=reference if record.stubbed else None)
        key = row.key.encode()
        headers: Headers = [(Header.KEY, key), (Header.STATUS, row.status.encode())]
        if piece is _Piece.RESULT:
            self._publisher.publish(self._names.results, key, value, headers, token=record)
        else:
            self._publisher.publish(self._names.replies, key, value, headers, partition=item.reply_to, token=record)

    def _note_deliveries(self) -> None:
        delivered: list[_Record]
        delivered, failures = self._publisher.poll()
        done: list[Item] = []
        for record in delivered:
            outcome = record.outcome
            outcome.records_left -= 1
            if not outcome.records_left:
                done.append(outcome.item)
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
        record: _Record = failure.token
        if failure.kind is FailureKind.TOO_LARGE and record.piece is not _Piece.DEAD and not record.stubbed:
            record.stubbed = True
            self._send(record)  # the answer is whole in Postgres; the record points to it
            return
        if failure.kind is FailureKind.FATAL:
            raise FatalError(f"the producer can deliver nothing any more: {failure.message}")
        self._log.error("publishing.refused", piece=record.piece.name, kind=failure.kind, error=failure.message)
        self._held = True
        self._hold("publish")
        self._refused.append(record)
        self._retry_at = time.monotonic() + _REFUSED_RETRY_S

    def _send_refused_again(self) -> None:
        if not self._refused or time.monotonic() < self._retry_at:
            return
        records, self._refused = self._refused, []
        self._resent.update(records)
        for record in records:
            self._send(record)
