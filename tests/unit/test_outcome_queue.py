"""Outcomes between threads: each is taken once, nobody sleeps through one."""

from __future__ import annotations

import threading
from typing import Any

from consumers.outcome_queue import OutcomeQueue

_DONE_S = 30.0


def test_two_takers_take_each_outcome_once() -> None:
    queue = OutcomeQueue()
    puts: list[Any] = list(range(50_000))
    taken: list[list[Any]] = [[], []]
    ended = threading.Event()

    def take(mine: list[Any]) -> None:
        while not ended.is_set() or queue:
            queue.wait(1.0)
            mine.extend(queue.take(7))

    takers = [threading.Thread(target=take, args=(mine,)) for mine in taken]
    for taker in takers:
        taker.start()
    for start in range(0, len(puts), 10):
        queue.put(puts[start : start + 10])
    ended.set()
    queue.wake()
    for taker in takers:
        taker.join(_DONE_S)
        assert not taker.is_alive()
    assert sorted(taken[0] + taken[1]) == puts
    assert all(mine == sorted(mine) for mine in taken), "each one's are in the order in which they were put"


def test_wake_ends_every_wait_and_a_put_ends_one() -> None:
    queue = OutcomeQueue()
    waiters = [threading.Thread(target=queue.wait, args=(_DONE_S,)) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    for waiter in waiters:  # each one may come to wait only now: it is woken until it is gone
        while waiter.is_alive():
            queue.wake()
            waiter.join(0.01)
    outcome: Any = object()
    putter = threading.Timer(0.05, queue.put, ([outcome],))
    putter.start()
    queue.wait(_DONE_S)
    assert queue.take(5) == [outcome]
    assert queue.take(1) == []
