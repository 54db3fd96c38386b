"""Who waits for the engine, and who of them enters next: order, credits, and what a suspect needs first."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from consumers.item import Item
from gpu_workers.credits import Credits, Need
from gpu_workers.lanes import Lanes, Waiting
from gpu_workers.suspects import Suspects

_SOLO_AFTER_DEATHS = 2
"""A request that was in the engine at two deaths runs alone, so that its neighbours are not blamed."""


def runs_alone(item: Item) -> bool:
    """Whether nobody else may be in the engine with it."""
    return item.deaths >= _SOLO_AFTER_DEATHS


class Entrance:
    """All that waits. Owned by the event loop; ``put`` and ``is_hungry`` may be called from any thread.

    Args:
        spawn: runs a coroutine on the event loop.
        changed: told, on the event loop, that somebody may enter who had to wait for a mark.
    """

    def __init__(
        self,
        class_names: Iterable[str],
        *,
        suspects: Suspects,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        changed: Callable[[], None],
    ) -> None:
        self.credits: Credits | None = None
        """None: the engine has not been up yet, and nobody enters."""
        self.alone = False
        """One that runs alone is in the engine."""
        self._suspects = suspects
        self._spawn = spawn
        self._changed = changed
        self._inbox: collections.deque[Sequence[Waiting]] = collections.deque()
        self._lanes = Lanes(class_names)
        self._marking = False

    def put(self, waiting: Sequence[Waiting]) -> None:
        """These wait from now on."""
        self._inbox.append(waiting)

    def is_hungry(self, class_name: str, *, long: bool) -> bool:
        """Whether nobody waits who could take a credit of this lane that is free."""
        credits = self.credits
        if credits is None or self._inbox or not self._lanes.is_empty(class_name, long=long):
            return False
        return credits.admits(Need(class_name, long, 0), shorter_wait=False)

    def put_back(self, waiting: Sequence[Waiting]) -> None:
        """These go first in their lanes, in the order given."""
        self._lanes.put_back(waiting)

    def take_all(self, chosen: Callable[[Item], bool]) -> list[Item]:
        """Takes out every waiting request for which ``chosen`` holds."""
        self._take_in()
        return self._lanes.take_all(chosen)

    def _take_in(self) -> None:
        while self._inbox:
            self._lanes.add(self._inbox.popleft())

    def next(self) -> Waiting | None:
        """The next request that may enter, taken out of its lane; None: nobody may.

        One whose lease feeds no more comes out without asking for a credit.
        """
        if self._inbox:
            self._take_in()
        credits = self.credits
        if credits is None or self.alone or credits.full:
            return None
        for class_name in credits.turn(self._lanes.classes()):
            lanes = self._lanes.by_age(class_name)
            for lane in lanes:
                item = lane[0].item
                if item.lease.feeding:
                    if not credits.admits(lane[0].need, shorter_wait=len(lanes) > 1):
                        continue
                    if runs_alone(item):
                        if credits.used or self._ask_mark([item]):
                            return None  # wait until the engine is empty and that is written down
                    elif item.watched:
                        free = itertools.islice(lane, credits.slots - credits.used)
                        if self._ask_mark([one.item for one in free if not runs_alone(one.item)]):
                            continue
                return lane.popleft()
        return None

    def _ask_mark(self, items: list[Item]) -> bool:
        """Whether the first of these must wait until it is written down that they are about to enter."""
        if not items[0].watched or items[0].marked:
            return False
        if not self._marking:
            self._marking = True
            self._spawn(self._mark([item for item in items if item.watched and not item.marked]))
        return True

    async def _mark(self, items: list[Item]) -> None:
        await self._suspects.mark(items)
        for item in items:
            item.marked = True
        self._marking = False
        self._changed()
