"""Requests that wait for a credit, in order. Pure: no clock, no thread, no engine.

Each class has two lanes, first in, first out: the longest bucket stands apart, so that it cannot block
the others when its share of the slots is used up.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable

import msgspec

from consumers.item import Item
from gpu_workers.credits import Need


class Waiting(msgspec.Struct):
    """A prepared request and what it would hold."""

    item: Item
    need: Need


Lane = collections.deque[Waiting]


class Lanes:
    """All waiting requests of a worker."""

    def __init__(self, class_names: Iterable[str]) -> None:
        self._lanes: dict[str, tuple[Lane, Lane]] = {
            name: (collections.deque(), collections.deque()) for name in class_names
        }

    def __len__(self) -> int:
        return sum(len(short) + len(long) for short, long in self._lanes.values())

    def add(self, waiting: Iterable[Waiting]) -> None:
        """To the end of their lanes."""
        lanes = self._lanes
        for one in waiting:
            lanes[one.need.class_name][one.need.long].append(one)

    def put_back(self, waiting: Iterable[Waiting]) -> None:
        """To the front of their lanes, in the order given."""
        for one in reversed(list(waiting)):
            self._lanes[one.need.class_name][one.need.long].appendleft(one)

    def is_empty(self, class_name: str, *, long: bool) -> bool:
        """Whether nobody waits in this lane."""
        return not self._lanes[class_name][long]

    def classes(self) -> list[str]:
        """The classes with waiting requests."""
        return [name for name, lanes in self._lanes.items() if any(lanes)]

    def by_age(self, class_name: str) -> list[Lane]:
        """The lanes of a class that hold something, the one with the older head first."""
        short, long = self._lanes[class_name]
        if not long:
            return [short] if short else []
        if not short:
            return [long]
        older = short[0].item.appended_ms <= long[0].item.appended_ms
        return [short, long] if older else [long, short]

    def take_all(self, chosen: Callable[[Item], bool]) -> list[Item]:
        """Takes out every waiting request for which ``chosen`` holds."""
        taken = []
        for lanes in self._lanes.values():
            for lane in lanes:
                kept = []
                for waiting in lane:
                    if chosen(waiting.item):
                        taken.append(waiting.item)
                    else:
                        kept.append(waiting)
                if len(kept) < len(lane):
                    lane.clear()
                    lane.extend(kept)
        return taken
