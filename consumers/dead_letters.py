"""Dead letters: what no worker can answer, kept whole enough to be replayed.

A dead letter keeps the record's key, bytes and headers and adds where it came from, why, and how often
it was tried. It always fits: where record and additions exceed the limit, the payload is cut away and
the origin stands as the reference to it.
"""

from __future__ import annotations

import dataclasses

from consumers.item import Headers, Outcome

TOPIC = "hr-dead-topic"
PARTITION = "hr-dead-partition"
OFFSET = "hr-dead-offset"
REASON = "hr-dead-reason"
MESSAGE = "hr-dead-message"
ATTEMPTS = "hr-dead-attempts"
AT_MS = "hr-dead-at-ms"
CUT_BYTES = "hr-dead-cut-bytes"
"""Set when the payload was cut: its size in bytes."""

_RECORD_OVERHEAD_BYTES = 512
_MESSAGE_BYTES = 1_000
_HEADER_BYTES = 8_192


@dataclasses.dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record for the dead topic."""

    key: bytes | None
    value: bytes | None
    headers: Headers


def dead_letter(outcome: Outcome, max_bytes: int) -> DeadLetter:
    """The dead letter of an outcome with ``dead_reason``; its record is at most ``max_bytes``."""
    item = outcome.item
    message = (outcome.row.error_message or "").encode("utf-8", "replace")[:_MESSAGE_BYTES]
    added: Headers = [
        (TOPIC, item.lease.topic.encode()),
        (PARTITION, str(item.lease.partition).encode()),
        (OFFSET, str(item.offset).encode()),
        (REASON, (outcome.dead_reason or "").encode()),
        (MESSAGE, message.decode("utf-8", "ignore").encode()),
        (ATTEMPTS, str(len(item.attempts)).encode()),
        (AT_MS, str(outcome.row.settled_ms).encode()),
    ]
    original = item.headers
    if _size(original) > _HEADER_BYTES:
        original = []
    value, key = item.raw_value, item.raw_key
    size = _RECORD_OVERHEAD_BYTES + _size(original + added) + len(value or b"") + len(key or b"")
    if value is not None and size > max_bytes:
        added.append((CUT_BYTES, str(len(value)).encode()))
        size -= len(value)
        value = b""
    if key is not None and size > max_bytes:
        key = key[:64]
    return DeadLetter(key, value, original + added)


def _size(headers: Headers) -> int:
    return sum(len(name.encode("utf-8", "replace")) + len(value or b"") + 8 for name, value in headers)
