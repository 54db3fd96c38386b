"""Results that come back on this client's partition of the replies topic.

``Box`` is pure state under a lock: who is waited for, what has arrived, both bounded. ``Replies`` reads
the partition on its own thread. No partition is leased: each client picks one at random, tells it in
the header of its requests, and throws away what others asked for there.
"""

from __future__ import annotations

import collections
import concurrent.futures
import random
import threading
import time

import msgspec
import orjson

from contract import logs, messages
from contract.errors import HeadraceError, TransientError
from contract.messages import Result
from contract.routing import Header
from contract.settings import Settings
from producers.backends import Backend, Reader, Record
from producers.estimate import Estimator
from producers.prepare import Prepared

MOST_AWAITED = 100_000
MOST_UNCLAIMED_BYTES = 64 * 2**20
_SLICE_S = 0.2


class Slot:
    """One request whose result is awaited. ``future`` ends with the result, or with why there will be none."""

    __slots__ = ("asked_s", "future", "id", "pool", "prompt_bytes", "size_bytes", "topic")

    def __init__(self, prepared: Prepared) -> None:
        self.id = prepared.ticket.id
        self.topic = prepared.ticket.topic
        self.pool = prepared.pool
        self.prompt_bytes = prepared.prompt_bytes
        self.size_bytes = 0
        self.asked_s = time.monotonic()
        self.future: concurrent.futures.Future[Result] = concurrent.futures.Future()
        self.future.set_running_or_notify_cancel()  # a cancelled waiter must not take the result from others


class Box:
    """The slots by key. Beyond its bounds the oldest are dropped, and their waiters told so."""

    def __init__(self, most_awaited: int = MOST_AWAITED, most_bytes: int = MOST_UNCLAIMED_BYTES) -> None:
        self._most_awaited = most_awaited
        self._most_bytes = most_bytes
        self._slots: collections.OrderedDict[str, Slot] = collections.OrderedDict()
        self._arrived: collections.OrderedDict[str, Slot] = collections.OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def expect(self, key: str, slot: Slot) -> None:
        """From now on the result of ``key`` is kept."""
        with self._lock:
            old = self._slots.get(key)
            if old is not None and not old.future.done():
                return  # submitted again while still awaited: the same waiters
            self._drop(key)
            self._slots[key] = slot
            if len(self._slots) > self._most_awaited:
                self._drop(next(iter(self._slots)))

    def awaits(self, key: str) -> Slot | None:
        """The slot of ``key``; None: nobody asked, it was taken or dropped."""
        return self._slots.get(key)

    def arrive(self, key: str, result: Result, size_bytes: int) -> None:
        """A result; the first of several for one key counts."""
        with self._lock:
            slot = self._slots.get(key)
            if slot is None or slot.future.done():
                return
            slot.size_bytes = size_bytes
            self._bytes += size_bytes
            self._arrived[key] = slot
            while self._bytes > self._most_bytes and len(self._arrived) > 1:
                self._drop(next(iter(self._arrived)))
            slot.future.set_result(result)

    def forget(self, key: str) -> None:
        """Its result was taken, or will never come."""
        with self._lock:
            self._drop(key)

    def fail(self, error: HeadraceError) -> None:
        """No more results will come."""
        with self._lock:
            for slot in self._slots.values():
                if not slot.future.done():
                    slot.future.set_exception(error)
            self._slots.clear()
            self._arrived.clear()
            self._bytes = 0

    def __len__(self) -> int:
        return len(self._slots)

    def _drop(self, key: str) -> None:
        slot = self._slots.pop(key, None)
        if slot is None:
            return
        if self._arrived.pop(key, None) is not None:
            self._bytes -= slot.size_bytes
        if not slot.future.done():
            slot.future.set_exception(
                TransientError(f"the result of request {slot.id} is no longer awaited", code="reply_dropped")
            )


class Replies:
    """The partition, its reader thread and the box."""

    def __init__(self, settings: Settings, backend: Backend, estimator: Estimator, partition_count: int) -> None:
        self._topic = settings.names.replies
        self._backend = backend
        self._estimator = estimator
        self._log = logs.get("producers")
        self._reader: Reader | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-replies", daemon=True)
        self._read = 0
        self._last_s: float | None = None
        self.partition = random.randrange(min(partition_count, settings.topics.reply_partitions))
        self.box = Box()

    def start(self) -> None:
        """Finds the partition's end and reads from there. Raises what ``Backend.read_partition`` raises."""
        self._reader = self._backend.read_partition(self._topic, self.partition)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Stops reading; those who still wait are told."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        self.box.fail(TransientError("the client was closed", code="client_closed"))

    def state(self) -> str:
        """What is known of this partition, for an error message."""
        last = "none yet" if self._last_s is None else f"the last {time.monotonic() - self._last_s:.1f} s ago"
        return f"partition {self.partition} of {self._topic}: {self._read} replies read, {last}"

    def _run(self) -> None:
        reader = self._reader
        assert reader is not None
        try:
            while not self._stop.is_set():
                for record in reader.poll(_SLICE_S):
                    self._take(record)
        except Exception as error:  # noqa: BLE001 - a thread's end is never silent
            self._log.error("replies.failed", error=repr(error))
            self.box.fail(TransientError(f"replies are no longer read: {error}", code="replies_failed"))
        finally:
            reader.close()

    def _take(self, record: Record) -> None:
        self._read += 1
        self._last_s = time.monotonic()
        key = next((value for name, value in reversed(record.headers) if name == Header.KEY), None)
        text = key.decode("ascii", "replace") if key is not None else ""
        slot = self.box.awaits(text)
        if slot is None or record.value is None:
            return
        try:
            result = messages.parse_result(record.value)
        except (msgspec.ValidationError, orjson.JSONDecodeError) as error:
            self._log.warning("replies.unreadable", key=text, error=str(error))
            return
        self.box.arrive(text, result, len(record.value))
        self._estimator.observe(slot.pool, slot.prompt_bytes, result.usage.prompt_tokens)
