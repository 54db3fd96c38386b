"""Time as a parameter: the event loop is the real clock, ``VirtualClock`` one that moves when told."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any, Protocol


class Timer(Protocol):
    """A callback that waits for its time."""

    def cancel(self) -> None:
        """It will not be called. Harmless when it was."""


class Clock(Protocol):
    """What an engine needs of time; ``asyncio.AbstractEventLoop`` has it."""

    def time(self) -> float:
        """Seconds since some fixed point."""

    def call_later(self, delay: float, callback: Callable[[], Any], /) -> Timer:
        """Calls back once ``delay`` seconds have passed; with 0, on the next turn."""


class VirtualTimer:
    """A timer of ``VirtualClock``."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], Any]) -> None:
        self.callback: Callable[[], Any] | None = callback

    def cancel(self) -> None:
        self.callback = None


class VirtualClock:
    """A clock for tests: time stands still until ``advance``, then callbacks run in order at their own times."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._order = itertools.count()
        self._timers: list[tuple[float, int, VirtualTimer]] = []

    def time(self) -> float:
        return self._now_s

    def call_later(self, delay: float, callback: Callable[[], Any], /) -> VirtualTimer:
        timer = VirtualTimer(callback)
        heapq.heappush(self._timers, (self._now_s + max(0.0, delay), next(self._order), timer))
        return timer

    def advance(self, seconds: float) -> None:
        """Moves time by ``seconds`` and runs what falls due, also what is set meanwhile."""
        until_s = self._now_s + seconds
        while self._timers and self._timers[0][0] <= until_s:
            due_s, _, timer = heapq.heappop(self._timers)
            self._now_s = max(self._now_s, due_s)
            if timer.callback is not None:
                timer.callback()
        self._now_s = until_s
