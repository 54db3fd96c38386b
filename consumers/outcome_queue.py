"""Outcomes on their way from any thread to those that work on them."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Sequence

from consumers.item import Outcome


class OutcomeQueue:
    """Put, waited for and taken from any thread. Its bound is the intakes' marks."""

    def __init__(self) -> None:
        self._outcomes: collections.deque[Outcome] = collections.deque()
        self._ready = threading.Condition()
        self._waiting = 0

    def __len__(self) -> int:
        return len(self._outcomes)

    def put(self, outcomes: Sequence[Outcome]) -> None:
        """Never blocks."""
        self._outcomes.extend(outcomes)
        if self._waiting:
            with self._ready:
                self._ready.notify()

    def wake(self) -> None:
        """Ends every wait."""
        with self._ready:
            self._ready.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Returns when something was put, at ``wake``, or after ``timeout_s``."""
        if not self._outcomes:
            with self._ready:
                self._waiting += 1
                if not self._outcomes:
                    self._ready.wait(timeout_s)
                self._waiting -= 1

    def take(self, count: int) -> list[Outcome]:
        """The first ``count``, or as many as there are."""
        taken: list[Outcome] = []
        with contextlib.suppress(IndexError):  # another thread took the rest
            taken.extend(self._outcomes.popleft() for _ in range(count))
        return taken
