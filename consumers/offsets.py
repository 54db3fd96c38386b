"""Which offsets of one partition are taken, which are done, and what may be committed. Pure.

One tracker lives for one assignment of one partition. Records are taken in rising order and may be
done in any order; what may be committed is the lowest offset that is taken and not done. Offsets may
have gaps (transaction markers, compaction): only records that were really taken count.

Legal moves: absent → taken → done. Anything else is answered by a word, not by an exception, because
after a rebalance late answers are normal.
"""

from __future__ import annotations

import collections
import enum


class Done(enum.StrEnum):
    """What became of a ``done`` call."""

    MOVED = "moved"
    """The commit position moved forward."""
    HELD = "held"
    """Noted; a lower offset is still unfinished."""
    UNKNOWN = "unknown"
    """This offset is not in hand: done before, or taken under another assignment."""


class OffsetTracker:
    """Taken and finished offsets of one assignment.

    Args:
        start: the position at assignment, if known; committing before anything was taken gives it back.
    """

    __slots__ = ("_bytes", "_done", "_order", "_position", "_sizes")

    def __init__(self, start: int | None = None) -> None:
        self._order: collections.deque[int] = collections.deque()
        self._sizes: dict[int, int] = {}
        self._done: set[int] = set()
        self._bytes = 0
        self._position = start

    @property
    def position(self) -> int | None:
        """What may be committed: the lowest unfinished offset, else the one after the last taken."""
        return self._order[0] if self._order else self._position

    @property
    def next_offset(self) -> int | None:
        """What is to be taken next if nothing is missing: the offset after the last taken, else the start."""
        return self._position

    @property
    def in_flight(self) -> int:
        """Records taken and not done."""
        return len(self._sizes)

    @property
    def in_flight_bytes(self) -> int:
        return self._bytes

    @property
    def distance(self) -> int:
        """How far the newest taken offset runs ahead of the lowest unfinished one."""
        return self._position - self._order[0] if self._order and self._position is not None else 0

    def take(self, offset: int, size_bytes: int) -> bool:
        """Notes a record as in hand. False: it is not above the last one taken and must not be worked on."""
        if self._position is not None and offset < self._position:
            return False
        self._order.append(offset)
        self._sizes[offset] = size_bytes
        self._bytes += size_bytes
        self._position = offset + 1
        return True

    def done(self, offset: int) -> Done:
        """Notes that a record's outcome is durable."""
        size = self._sizes.pop(offset, None)
        if size is None:
            return Done.UNKNOWN
        self._bytes -= size
        if self._order[0] != offset:
            self._done.add(offset)
            return Done.HELD
        self._order.popleft()
        while self._order and self._order[0] in self._done:
            self._done.remove(self._order.popleft())
        return Done.MOVED
