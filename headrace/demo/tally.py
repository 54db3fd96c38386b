"""What was published and what came back. Pure; one thread publishes a class, one reads results."""

from __future__ import annotations

import collections
import dataclasses

import msgspec
import orjson

from contract.messages import Result
from contract.statuses import ANSWERS
from headrace.demo.load import OFFLINE, ONLINE

_RECENT = 4_000
"""Answers that the live figures look back on."""


@dataclasses.dataclass(slots=True)
class Counts:
    """One class so far."""

    planned: int = 0
    published: int = 0
    settled: int = 0

    @property
    def open(self) -> int:
        """Published and not settled: the lag, in requests. (A result may be read before its acknowledgement.)"""
        return max(0, self.published - self.settled)


@dataclasses.dataclass(frozen=True, slots=True)
class Recent:
    """One answered request, for live figures. ``at_s`` is monotonic."""

    at_s: float
    class_name: str
    latency_ms: float


@dataclasses.dataclass(slots=True)
class Tally:
    """Counts and keys of one run."""

    counts: dict[str, Counts] = dataclasses.field(default_factory=lambda: {ONLINE: Counts(), OFFLINE: Counts()})
    published: dict[str, str] = dataclasses.field(default_factory=dict)
    """Key → id of every request that the broker acknowledged."""
    seen: dict[str, int] = dataclasses.field(default_factory=dict)
    """Key → hash of its result as the results topic has it."""
    conflicting: set[str] = dataclasses.field(default_factory=set)
    """Keys with two different results on the topic."""
    recent: collections.deque[Recent] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=_RECENT))

    @property
    def open(self) -> int:
        """Published and not settled, all classes."""
        return sum(counts.open for counts in self.counts.values())

    def acknowledged(self, class_name: str, key: str, request_id: str) -> None:
        """The broker has a request."""
        self.published[key] = request_id
        self.counts[class_name].published += 1

    def settled(self, result: Result, now_s: float) -> None:
        """A result came on the topic. Its class stands at the head of its id."""
        content = hash(orjson.dumps(msgspec.to_builtins(result)))
        if result.key in self.seen:
            if self.seen[result.key] != content:
                self.conflicting.add(result.key)
            return
        self.seen[result.key] = content
        class_name = (result.id or "").partition("-")[0]
        self.counts[class_name].settled += 1
        if result.status in ANSWERS:
            self.recent.append(Recent(now_s, class_name, result.latency_ms))
