"""Which keys this worker is computing, so that two records with one key are not computed side by side.

The first record with a key is its *leader*; later ones wait behind it and are judged again when the
leader's outcome is durable (then they are duplicates) or given up. Between workers the database
decides; this only saves the work.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable, Sequence

from consumers.item import Item


class InHand:
    """Thread-safe. Every item that ``admit`` returned ends by ``complete`` or ``drop``, exactly once.

    Args:
        readmit: takes followers whose leader is gone, grouped by nothing; must not block.
    """

    def __init__(self, readmit: Callable[[list[Item]], None]) -> None:
        self._lock = threading.Lock()
        self._followers: dict[str, list[Item] | None] = {}
        self._readmit = readmit

    def __len__(self) -> int:
        return len(self._followers)

    def admit(self, items: Sequence[Item]) -> list[Item]:
        """The leaders among ``items``; the others now wait."""
        leaders = []
        followers = self._followers
        with self._lock:
            for item in items:
                key = item.key
                if key in followers:
                    waiting = followers[key]
                    if waiting is None:
                        followers[key] = [item]
                    else:
                        waiting.append(item)
                else:
                    followers[key] = None
                    leaders.append(item)
        return leaders

    def complete(self, items: Iterable[Item]) -> None:
        """The outcomes of these leaders are durable and published: their offsets may move."""
        self._end(items, dropped=False)

    def drop(self, items: Iterable[Item]) -> None:
        """These leaders are given up without an outcome; their records stay uncommitted."""
        self._end(items, dropped=True)

    def _end(self, items: Iterable[Item], *, dropped: bool) -> None:
        again: list[Item] = []
        with self._lock:
            for item in items:
                if waiting := self._followers.pop(item.key, None):
                    again += waiting
                if dropped:
                    item.lease.drop()
                else:
                    item.lease.complete(item.offset)
        if again:
            self._readmit(again)


def by_class(items: Iterable[Item]) -> dict[str, list[Item]]:
    """Items grouped by the priority class of the topic they came on."""
    groups: dict[str, list[Item]] = collections.defaultdict(list)
    for item in items:
        groups[item.lease.route.class_name].append(item)
    return dict(groups)
