"""A record as it is read, and how large one is on the wire. Pure.

A broker compares ``max.message.bytes`` with a whole batch. A record "fits" when a batch that holds it
alone does, so that "fits" never depends on its neighbours. Sizes are before compression.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

Headers = Sequence[tuple[str, bytes | None]]


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """One record read. ``timestamp_ms`` is the topic's: append or create time."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]


_BATCH_HEAD_BYTES = 61
_FIXED_BYTES = 3
"""Attributes, timestamp delta 0, offset delta 0: one byte each."""
_NULL_BYTES = 1
_MOST_FRAMING_BYTES = _BATCH_HEAD_BYTES + _FIXED_BYTES + 4 * 5
"""Batch head, fixed bytes, and the lengths of record, key, value and header list at their longest."""
_MOST_HEADER_FRAMING_BYTES = 2 * 5
_MOST_UTF8_BYTES = 4


def fits(key: bytes | None, value: bytes | None, headers: Headers, limit_bytes: int) -> bool:
    """Whether a broker whose limit is ``limit_bytes`` takes the record. Cheap for all but the largest."""
    most = _MOST_FRAMING_BYTES + len(key or b"") + len(value or b"")
    for name, header in headers:
        most += _MOST_HEADER_FRAMING_BYTES + _MOST_UTF8_BYTES * len(name) + len(header or b"")
    return most <= limit_bytes or record_bytes(key, value, headers) <= limit_bytes


def record_bytes(key: bytes | None, value: bytes | None, headers: Headers) -> int:
    """Bytes of a batch (format 2, uncompressed) that holds this record alone."""
    body = _FIXED_BYTES + _sized(key) + _sized(value) + _varint_bytes(len(headers))
    for name, header in headers:
        body += _sized(name.encode()) + _sized(header)
    return _BATCH_HEAD_BYTES + _varint_bytes(body) + body


def _sized(data: bytes | None) -> int:
    return _NULL_BYTES if data is None else _varint_bytes(len(data)) + len(data)


def _varint_bytes(number: int) -> int:
    """Length of a zigzag varint of ``number`` ≥ 0."""
    return max(1, -(-(2 * number).bit_length() // 7))
