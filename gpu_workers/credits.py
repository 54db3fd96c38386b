"""Who may enter the engine next. Pure: counts and decisions, no clock, no thread.

A credit is a request slot and room in the KV cache. The engine's own limit equals the credits, so its
queue stays empty and order is decided here. Rules, in this order:

1. Slots and KV tokens never exceed the engine's.
2. As many slots as are *reserved* for a class stay free beside what it holds: lower classes may not take them.
   All others are lent, and come back one by one as lent work ends. A reserve that counted what the class holds
   already would be used up by its usual load, and a burst would wait for lent work to end.
3. A class below its *floor* goes first and may take any free slot, however busy higher classes are, so that
   offline stays alive.
4. Else the class of lowest rank that has work goes first.
5. The longest bucket holds at most its share of the slots while shorter requests of its class wait. While
   none waits it may hold more, so that no slot idles that a short request does not need; that comes back
   one by one, too. Within a class the oldest request goes first.

With *closed batches* the engine fills only when it is empty, and what enters together is all of the longest
bucket or none of it: a batch lasts as long as its longest request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from contract.settings import PriorityClass


class Need(NamedTuple):
    """What one request would hold."""

    class_name: str
    long: bool
    kv_tokens: int


class Credits:
    """The engine's slots and KV room, and who holds them."""

    def __init__(
        self,
        classes: Mapping[str, PriorityClass],
        *,
        slots: int,
        kv_tokens: int,
        long_share: float,
        long_share_alone: float,
        closed_batches: bool = False,
    ) -> None:
        self._order = sorted(classes, key=lambda name: classes[name].rank)
        self._classes = {name: classes[name] for name in self._order}
        self._slots = slots
        self._kv_tokens = kv_tokens
        self._long_slots = max(1, int(slots * long_share))
        self._long_slots_alone = max(self._long_slots, int(slots * long_share_alone))
        self._closed_batches = closed_batches
        self._held = dict.fromkeys(self._order, 0)
        self._long_held = 0
        self._kv_held = 0
        self._used = 0
        reserved_above = 0
        self._limits: dict[str, int] = {}
        """A class may enter while fewer slots than this are held: all of them less what is reserved above it."""
        for name in self._order:
            self._limits[name] = slots - reserved_above
            reserved_above += classes[name].reserved_slots

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def used(self) -> int:
        """Slots held."""
        return self._used

    @property
    def full(self) -> bool:
        """Whether nobody at all may enter."""
        return self._used >= self._slots

    @property
    def kv_used_tokens(self) -> int:
        return self._kv_held

    def held(self, class_name: str) -> int:
        return self._held[class_name]

    def turn(self, waiting: Iterable[str]) -> list[str]:
        """The classes with waiting work, in the order in which they may try to enter."""
        present = set(waiting)
        ordered = [name for name in self._order if name in present]
        if len(ordered) < 2:
            return ordered
        starved = [name for name in ordered if self._held[name] < self._classes[name].floor_slots]
        return starved + [name for name in ordered if name not in starved]

    def has_slot(self, class_name: str) -> bool:
        """Whether a (short, small) request of this class could enter now."""
        if self._held[class_name] < self._classes[class_name].floor_slots:
            return self._used < self._slots
        return self._used < self._limits[class_name]

    def admits(self, need: Need, *, shorter_wait: bool) -> bool:
        """Whether this request may enter now. One larger than the whole KV room may enter alone.

        ``shorter_wait``: whether shorter requests of its class wait; it matters to long ones alone.
        """
        if not self.has_slot(need.class_name):
            return False
        if need.long and self._long_held >= (self._long_slots if shorter_wait else self._long_slots_alone):
            return False
        if self._closed_batches and self._used and need.long != bool(self._long_held):
            return False
        return self._kv_held + need.kv_tokens <= self._kv_tokens or self._used == 0

    def take(self, need: Need) -> None:
        """Hands the credit out. The caller asked ``admits`` first."""
        self._held[need.class_name] += 1
        self._long_held += need.long
        self._kv_held += need.kv_tokens
        self._used += 1

    def give_back(self, need: Need) -> None:
        """Takes the credit back when the request left the engine."""
        self._held[need.class_name] -= 1
        self._long_held -= need.long
        self._kv_held -= need.kv_tokens
        self._used -= 1
