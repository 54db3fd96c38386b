"""Outcomes on their way from any thread to the one that works on them."""

from __future__ import annotations

import collections
import threading
from collections.abc import Sequence

from consumers.item import Outcome


class OutcomeQueue:
    """Put from any thread, waited for and taken by one. Its bound is the intakes' marks."""

    def __init__(self) -> None:
        self._outcomes: collections.deque[Outcome] = collections.deque()
        self._ready = threading.Condition()
        self._waiting = False

    def __len__(self) -> int:
        return len(self._outcomes)

    def put(self, outcomes: Sequence[Outcome]) -> None:
        """Never blocks."""
        self._outcomes.extend(outcomes)
        if self._waiting:
            self.wake()

    def wake(self) -> None:
        """Ends a wait, if there is one."""
        with self._ready:
            self._ready.notify()

    def wait(self, timeout_s: float) -> None:
        """Returns when something was put, at ``wake``, or after ``timeout_s``."""
        if not self._outcomes:
            with self._ready:
                self._waiting = True
                if not self._outcomes:
                    self._ready.wait(timeout_s)
                self._waiting = False

    def take(self, count: int) -> list[Outcome]:
        """The first ``count``, which must be there."""
        return [self._outcomes.popleft() for _ in range(count)]
