"""When a window closes. Pure; time is an argument.

A window bounds the pull from Kafka. It closes at the first of three bounds, or at once when the
engine would otherwise idle.
"""

from __future__ import annotations

import enum
from typing import Generic, TypeVar

from contract.settings import Window as Bounds

T = TypeVar("T")


class Closing(enum.StrEnum):
    """Why a window closed."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    WAIT = "wait"
    HUNGRY = "hungry"


class Window(Generic[T]):
    """Records gathered until a bound is met; empty again after ``drain``."""

    __slots__ = ("_bounds", "_opened_ns", "_records", "_tokens")

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._records: list[T] = []
        self._tokens = 0
        self._opened_ns = 0

    def __len__(self) -> int:
        return len(self._records)

    @property
    def room(self) -> int:
        """Records that still fit."""
        return self._bounds.max_requests - len(self._records)

    def add(self, record: T, tokens: int, now_ns: int) -> None:
        """Adds one record; the first one opens the window."""
        if not self._records:
            self._opened_ns = now_ns
        self._records.append(record)
        self._tokens += tokens

    def closing(self, now_ns: int, *, hungry: bool) -> Closing | None:
        """Why the window closes now; None: it stays open. An empty window never closes."""
        if not self._records:
            return None
        if len(self._records) >= self._bounds.max_requests:
            return Closing.REQUESTS
        if self._tokens >= self._bounds.max_tokens:
            return Closing.TOKENS
        if hungry:
            return Closing.HUNGRY
        if now_ns - self._opened_ns >= self._bounds.max_wait_ms * 1_000_000:
            return Closing.WAIT
        return None

    def wait_s(self, now_ns: int) -> float:
        """Seconds until ``max_wait_ms`` closes it; infinite while empty."""
        if not self._records:
            return float("inf")
        return max(0.0, self._bounds.max_wait_ms / 1_000 - (now_ns - self._opened_ns) / 1e9)

    def drain(self) -> list[T]:
        """Takes the records out and opens anew with the next one."""
        records, self._records, self._tokens = self._records, [], 0
        return records
