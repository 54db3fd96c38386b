"""What is on its way to the broker: bounded (``Gate``), and told to whoever waits (``Delivery``, ``Stream``)."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterator

from broker.publisher import Failure, FailureKind
from contract.errors import FatalError, HeadraceError, InvalidRequest, TransientError
from producers.prepare import Ticket


class DeliveryFailed(TransientError):
    """The broker did not acknowledge in time. It may hold the request all the same: submit it again under the
    same id, and it is answered once.

    ``id`` is the request's; ``index`` its place in ``submit_many``'s input, from 0 (None: single).
    """

    def __init__(self, message: str, *, id: str, index: int | None, code: str = "delivery_failed") -> None:
        super().__init__(message, code=code)
        self.id = id
        self.index = index


class DeliveryRefused(FatalError):
    """The broker refuses for good: no such topic, no right to write. The next request fares the same."""


class Gate:
    """Bounds records and bytes that are sent and not acknowledged. Any thread.

    One record always fits an empty gate, whatever its size.
    """

    def __init__(self, most_records: int, most_bytes: int) -> None:
        self._most_records = most_records
        self._most_bytes = most_bytes
        self._records = 0
        self._bytes = 0
        self._waiters = 0
        self._changed = threading.Condition(threading.Lock())

    def try_take(self, size_bytes: int) -> bool:
        """Takes room for one record if there is room now and nobody waits for it."""
        with self._changed:
            if self._waiters or self._full(size_bytes):
                return False
            self._records += 1
            self._bytes += size_bytes
            return True

    def take(self, size_bytes: int, timeout_s: float) -> bool:
        """Waits for room; False at the deadline."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._full(size_bytes):
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                self._waiters += 1
                self._changed.wait(left_s)
                self._waiters -= 1
            self._records += 1
            self._bytes += size_bytes
            return True

    def give_back(self, size_bytes: int) -> None:
        """One record has ended. Waiters are woken at half full: at each record would cost a switch for each."""
        with self._changed:
            self._records -= 1
            self._bytes -= size_bytes
            if self._waiters and self._records <= self._most_records // 2 and self._bytes <= self._most_bytes // 2:
                self._changed.notify_all()

    def _full(self, size_bytes: int) -> bool:
        too_much = self._records >= self._most_records or self._bytes + size_bytes > self._most_bytes
        return too_much and self._records > 0

    @property
    def taken(self) -> int:
        """Records on their way."""
        return self._records


class Delivery:
    """One record on its way, or a request that never left because it is invalid."""

    __slots__ = ("_gate", "ended", "failure", "index", "invalid", "size_bytes", "ticket", "waiter")

    def __init__(self, ticket: Ticket | None, size_bytes: int, gate: Gate | None, index: int | None = None) -> None:
        self.ticket = ticket
        self.size_bytes = size_bytes
        self.index = index
        self.ended = False
        self.failure: Failure | None = None
        self.invalid: InvalidRequest | None = None
        self.waiter: Callable[[Delivery], object] | None = None
        self._gate = gate

    def end(self, failure: Failure | None) -> None:
        """The backend's ``done``: called once, on its thread."""
        if self._gate is not None:
            self._gate.give_back(self.size_bytes)
        self.failure = failure
        self.ended = True
        waiter = self.waiter
        if waiter is not None:
            waiter(self)

    def error(self) -> HeadraceError | None:
        """What went wrong, naming the request; None: acknowledged."""
        where = "" if self.index is None else f"item {self.index}: "
        if self.invalid is not None:
            return InvalidRequest(where + self.invalid.message, code=self.invalid.code, param=self.invalid.param)
        if self.failure is None or self.ticket is None:
            return None
        said = f"{self.failure.code}: {self.failure.message}"
        text = f"{where}request {self.ticket.id} to {self.ticket.topic}: {said}"
        if self.failure.kind is FailureKind.TOO_LARGE:
            return InvalidRequest(f"{text} (compare `headrace topics check`)", code="too_large")
        if self.failure.kind is FailureKind.RETRIABLE:
            return DeliveryFailed(text, id=self.ticket.id, index=self.index)
        return DeliveryRefused(text)


class Stream:
    """Deliveries in order of submission, at most ``most`` at a time. One thread adds and takes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._deliveries: collections.deque[Delivery] = collections.deque()
        self._wake = threading.Event()

    def __len__(self) -> int:
        return len(self._deliveries)

    @property
    def full(self) -> bool:
        return len(self._deliveries) >= self._most

    def add(self, delivery: Delivery) -> None:
        self._deliveries.append(delivery)

    def ready(self) -> Iterator[Delivery]:
        """Takes out those that have ended, up to the first that has not."""
        deliveries = self._deliveries
        while deliveries and deliveries[0].ended:
            yield deliveries.popleft()

    def wait(self, timeout_s: float) -> bool:
        """Waits until ``ready`` has something; when full until about half has ended. False at the deadline."""
        deliveries = self._deliveries
        middle = deliveries[len(deliveries) // 2]
        if self.full and not middle.ended and not self._wait_for(middle, timeout_s):
            return deliveries[0].ended
        return self._wait_for(deliveries[0], timeout_s)

    def _wait_for(self, delivery: Delivery, timeout_s: float) -> bool:
        self._wake.clear()
        delivery.waiter = self._woken
        return delivery.ended or self._wake.wait(timeout_s)

    def _woken(self, _delivery: Delivery) -> None:
        self._wake.set()
