"""Makes requests ready for the engine on the thread that brings them, some at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from consumers.item import Item
from contract.errors import InvalidRequest
from contract.settings import Settings
from gpu_workers.credits import Need
from gpu_workers.engine import Engine
from gpu_workers.lanes import Waiting

_CHUNK = 32
"""Requests made ready at first, then twice as many and so on: the first of a large window reach the engine while the
rest are prepared."""


class Preparation:
    """Any thread."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self._engine = engine
        self._whole = settings.engine.closed_batches
        buckets = list(settings.buckets.edges)
        self._long_bucket = buckets[-1] if len(buckets) > 1 else ""

    def is_long(self, bucket: str) -> bool:
        """Whether this is the longest bucket, which has a share of the slots. The only bucket is not."""
        return bucket == self._long_bucket

    def chunks(self, items: Sequence[Item]) -> Iterator[tuple[list[Waiting], list[tuple[Item, InvalidRequest]]]]:
        """Those ready for the engine, and those that its own checks refuse."""
        start, size = 0, len(items) if self._whole else _CHUNK
        while start < len(items):
            yield self._prepare(items[start : start + size])
            start, size = start + size, size * 2

    def _prepare(self, items: Sequence[Item]) -> tuple[list[Waiting], list[tuple[Item, InvalidRequest]]]:
        ready: list[Waiting] = []
        refused: list[tuple[Item, InvalidRequest]] = []
        for item, prepared in zip(items, self._engine.prepare([item.request for item in items]), strict=True):
            if isinstance(prepared, InvalidRequest):
                refused.append((item, prepared))
            else:
                item.prepared = prepared
                route = item.lease.route
                ready.append(Waiting(item, Need(route.class_name, self.is_long(route.bucket), prepared.kv_tokens)))
        return ready, refused
