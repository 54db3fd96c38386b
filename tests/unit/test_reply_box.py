"""Whose results are kept, and for how long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import TransientError
from contract.messages import Result
from contract.statuses import Status
from producers.prepare import Prepared, Ticket
from producers.replies import Box, Slot


def slot(key: str) -> Slot:
    return Slot(Prepared(Ticket(f"id-{key}", key, "topic"), b"", b"", [], "default", 10))


def result(key: str) -> Result:
    return Result(key=key, status=Status.OK)


def test_result_that_came_before_anybody_waits_is_kept() -> None:
    box = Box()
    box.expect("a", slot("a"))
    box.arrive("a", result("a"), 100)
    kept = box.awaits("a")
    assert kept is not None
    assert kept.future.result(0).key == "a"


def test_result_nobody_asked_for_is_not_kept() -> None:
    box = Box()
    box.arrive("a", result("a"), 100)
    assert box.awaits("a") is None
    assert len(box) == 0


def test_second_reply_of_a_redelivered_request_changes_nothing() -> None:
    box = Box()
    box.expect("a", slot("a"))
    first, second = result("a"), result("a")
    box.arrive("a", first, 1)
    box.arrive("a", second, 1)
    kept = box.awaits("a")
    assert kept is not None
    assert kept.future.result(0) is first


def test_oldest_waiter_gives_way_and_is_told() -> None:
    box = Box(most_awaited=2)
    slots = {key: slot(key) for key in "abc"}
    for key in "abc":
        box.expect(key, slots[key])
    assert box.awaits("a") is None
    with pytest.raises(TransientError, match="id-a"):
        slots["a"].future.result(0)
    assert not slots["b"].future.done()


def test_unclaimed_results_are_bounded_in_bytes() -> None:
    box = Box(most_bytes=250)
    for key in "abcd":
        box.expect(key, slot(key))
    for key in "abc":
        box.arrive(key, result(key), 100)
    assert box.awaits("a") is None
    assert box.awaits("b") is not None
    box.arrive("d", result("d"), 1_000)  # one larger than the bound is kept, alone
    assert [key for key in "abcd" if box.awaits(key)] == ["d"]


def test_resubmission_while_awaited_keeps_the_waiters_and_after_the_answer_waits_anew() -> None:
    box = Box()
    first, second = slot("a"), slot("a")
    box.expect("a", first)
    box.expect("a", second)
    assert box.awaits("a") is first
    box.arrive("a", result("a"), 1)
    box.expect("a", second)
    assert box.awaits("a") is second
    assert not second.future.done()


def test_end_of_reading_is_told_to_all_who_wait() -> None:
    box = Box()
    waiting, done = slot("a"), slot("b")
    box.expect("a", waiting)
    box.expect("b", done)
    box.arrive("b", result("b"), 1)
    box.fail(TransientError("closed", code="client_closed"))
    with pytest.raises(TransientError, match="closed"):
        waiting.future.result(0)
    assert done.future.result(0).key == "b"


@given(st.lists(st.tuples(st.sampled_from(["expect", "arrive", "forget"]), st.sampled_from("abcdef")), max_size=80))
def test_bounds_hold_and_books_balance_in_any_order(steps: list[tuple[str, str]]) -> None:
    box = Box(most_awaited=3, most_bytes=25)
    for step, key in steps:
        if step == "expect":
            box.expect(key, slot(key))
        elif step == "arrive":
            box.arrive(key, result(key), 10)
        else:
            box.forget(key)
        assert len(box) <= 3
        assert box._bytes == 10 * len(box._arrived) <= 25
        assert set(box._arrived) <= set(box._slots)
