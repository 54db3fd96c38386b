"""What the broker refuses holds the intakes until the broker has it, not merely until it is sent again."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from broker.publisher import Failure, FailureKind, Publisher
from broker.records import Headers
from consumers.in_hand import InHand
from consumers.item import Desk, Item, Lease, Outcome
from consumers.publishing import Publishing
from contract.routing import Route
from contract.settings import Settings
from contract.statuses import Status

WAIT_S = 10.0


class Scripted(Publisher):
    """Takes records and says of each what the test tells it to."""

    def __init__(self) -> None:
        super().__init__(Settings())
        self.sent: collections.deque[Any] = collections.deque()
        self.arrived = threading.Semaphore(0)

    def start(self) -> None:
        pass

    def publish(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        partition: int | None = None,
        token: Any = None,
    ) -> None:
        self.sent.append(token)
        self.arrived.release()

    def poll(self, wait_s: float = 0.0) -> tuple[list[Any], list[Failure]]:
        acknowledged, self._acknowledged = list(self._acknowledged), collections.deque()
        failed, self._failed = list(self._failed), collections.deque()
        return acknowledged, failed

    def flush(self, deadline_s: float) -> int:
        time.sleep(deadline_s)
        return len(self.sent)

    def close(self, deadline_s: float) -> int:
        return 0

    def refuse(self) -> None:
        self._failed.append(Failure(self.sent.popleft(), FailureKind.REFUSED, "INVALID_TIMESTAMP", "no"))

    def acknowledge(self) -> None:
        self._acknowledged.append(self.sent.popleft())


class Holds:
    """The intakes' side: why they hold, and when that last changed."""

    def __init__(self) -> None:
        self.reasons: set[str] = set()
        self.changed = threading.Semaphore(0)

    def hold(self, reason: str) -> None:
        self.reasons.add(reason)
        self.changed.release()

    def release(self, reason: str) -> None:
        self.reasons.discard(reason)
        self.changed.release()


@pytest.fixture
def publisher() -> Scripted:
    return Scripted()


@pytest.fixture
def holds() -> Holds:
    return Holds()


@pytest.fixture
def publishing(publisher: Scripted, holds: Holds) -> Iterator[Publishing]:
    one = Publishing(
        Settings(), publisher=publisher, in_hand=InHand(lambda items: None), hold=holds.hold, release=holds.release,
        failed=lambda error: None,
    )  # fmt: skip
    one.start()
    yield one
    one.stop(time.monotonic())


def _stored() -> Outcome:
    """An answer from the store: it needs no transaction."""
    lease = Lease("p.default.online.short", 3, 1, Route("default", "online", "short"), collections.deque())
    row = Desk("w", 1).outcome(Item(lease, 42, 1_000, None, b"", []), Status.OK, 2_000).row
    return Outcome(Item(lease, 42, 1_000, None, b"", []), row, stored=True)


def test_refused_record_holds_the_intakes_until_the_broker_has_it(
    publishing: Publishing, publisher: Scripted, holds: Holds
) -> None:
    publishing.put([_stored()])
    for _ in range(2):
        assert publisher.arrived.acquire(timeout=WAIT_S)
        publisher.refuse()
        assert holds.changed.acquire(timeout=WAIT_S)
        assert holds.reasons == {"publish"}
    assert publisher.arrived.acquire(timeout=WAIT_S)  # sent again: on its way, not yet there
    assert not holds.changed.acquire(timeout=0.2)
    assert holds.reasons == {"publish"}
    publisher.acknowledge()
    assert holds.changed.acquire(timeout=WAIT_S)
    assert holds.reasons == set()
