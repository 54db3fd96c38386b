"""What is on its way: bounds, order, and that nobody waits for ever."""

from __future__ import annotations

import collections
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from broker.publisher import Failure, FailureKind
from contract.errors import FatalError, InvalidRequest, TransientError
from producers.deliveries import Delivery, DeliveryFailed, Gate, Stream
from producers.prepare import Ticket

TICKET = Ticket("id-1", "key-1", "topic-1")


class GateMachine(RuleBasedStateMachine):
    """The gate against two sums."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate(5, 100)
        self.taken: list[int] = []

    @rule(size=st.integers(0, 150))
    def take(self, size: int) -> None:
        fits = not self.taken or (len(self.taken) < 5 and sum(self.taken) + size <= 100)
        assert self.gate.try_take(size) is fits
        if fits:
            self.taken.append(size)

    @rule()
    def give_back(self) -> None:
        if self.taken:
            self.gate.give_back(self.taken.pop())

    @invariant()
    def counts_agree(self) -> None:
        assert self.gate.taken == len(self.taken)


TestGate = GateMachine.TestCase


def test_gate_wakes_every_waiter_and_no_newcomer_overtakes_for_ever() -> None:
    gate = Gate(4, 1_000)
    for _ in range(4):
        assert gate.try_take(1)
    got: list[bool] = []
    waiters = [threading.Thread(target=lambda: got.append(gate.take(1, 10))) for _ in range(4)]
    for thread in waiters:
        thread.start()
    while gate._waiters < 4:
        pass
    gate.give_back(1)
    assert not gate.try_take(1)  # there is room, but others were here first
    for _ in range(3):
        gate.give_back(1)
    for thread in waiters:
        thread.join(10)
    assert got == [True] * 4


def test_gate_gives_up_at_the_deadline() -> None:
    gate = Gate(1, 1_000)
    assert gate.try_take(1)
    assert gate.take(1, 0.01) is False
    assert gate.taken == 1


@given(st.lists(st.integers(0, 30), max_size=60), st.integers(1, 12))
def test_stream_gives_deliveries_in_order_whatever_order_they_end_in(ends: list[int], most: int) -> None:
    stream, added, taken = Stream(most), collections.deque[Delivery](), []
    for index, end in enumerate(ends):
        delivery = Delivery(TICKET, 0, None, index)
        stream.add(delivery)
        added.append(delivery)
        for other in list(added)[: end + 1][end:]:
            other.end(None)
        taken += [d.index for d in stream.ready()]
    for delivery in added:
        delivery.end(None)
    taken += [d.index for d in stream.ready()]
    assert taken == list(range(len(ends)))


def test_full_stream_waits_for_its_head_even_when_its_middle_has_ended() -> None:
    stream = Stream(4)
    deliveries = [Delivery(TICKET, 0, None, index) for index in range(4)]
    for delivery in deliveries:
        stream.add(delivery)
    deliveries[2].end(None)
    assert stream.wait(0.01) is False
    threading.Timer(0.02, deliveries[0].end, [None]).start()
    assert stream.wait(10) is True
    assert [d.index for d in stream.ready()] == [0]


def test_end_between_look_and_wait_is_not_missed() -> None:
    for _ in range(200):
        stream, delivery = Stream(1), Delivery(TICKET, 0, None, 0)
        stream.add(delivery)
        thread = threading.Thread(target=delivery.end, args=[None])
        thread.start()
        assert stream.wait(10) is True
        thread.join()


@pytest.mark.parametrize(
    ("kind", "error", "code"),
    [
        (FailureKind.TOO_LARGE, InvalidRequest, "too_large"),
        (FailureKind.RETRIABLE, DeliveryFailed, "delivery_failed"),
        (FailureKind.REFUSED, FatalError, None),
        (FailureKind.FATAL, FatalError, None),
    ],
)
def test_failed_delivery_names_its_item_and_takes_the_right_branch(
    kind: FailureKind, error: type[Exception], code: str | None
) -> None:
    gate = Gate(1, 10)
    assert gate.try_take(7)
    delivery = Delivery(TICKET, 7, gate, index=17)
    delivery.end(Failure(None, kind, "SOME_CODE", "text"))
    found = delivery.error()
    assert isinstance(found, error)
    assert "item 17" in str(found)
    assert "id-1" in str(found)
    assert getattr(found, "code", None) == code
    assert gate.taken == 0


def test_delivery_failure_is_transient_and_carries_id_and_place() -> None:
    error = DeliveryFailed("m", id="i", index=3)
    assert isinstance(error, TransientError)
    assert (error.id, error.index) == ("i", 3)
