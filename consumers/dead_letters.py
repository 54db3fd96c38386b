"""Dead letters: what no worker can answer, kept whole enough to be replayed. Pure.

A dead letter keeps the record's key, bytes and headers and adds where it came from, why, and how often
it was tried. It always fits: where record and additions exceed the limit, the payload is cut away and
the origin stands as the reference to it.
"""

from __future__ import annotations

import dataclasses
import json
from typing import NamedTuple

from broker.records import Record
from consumers.item import Headers, Outcome, number
from contract import identity, messages
from contract.messages import Request
from contract.routing import Header

UNREADABLE = frozenset({"tombstone", "empty_value", "invalid_json", "not_an_object"})
"""Codes of what has no readable request in it; kept as a dead letter too: its bytes are all there is."""

PREFIX = "hr-dead-"
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
_LAST_MS = 253_402_300_799_999
"""The end of the year 9999: no later moment can be shown."""


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
    original = _own(item.headers)  # what is left of an earlier letter says nothing about this one
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


class Place(NamedTuple):
    """Where a record stands."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}/{self.offset}"


@dataclasses.dataclass(frozen=True, slots=True)
class DeadLetterView:
    """A dead letter as it is read back. Anybody may write to its topic: what cannot be read is None or empty."""

    at: Place
    """Where the letter stands."""
    origin: Place | None
    """Where the record stood."""
    reason: str
    message: str
    attempts: int | None
    at_ms: int
    """When the request was given up; else when the letter was written."""
    cut_bytes: int | None
    """Size of the payload that was cut away; None: it is whole."""
    key: bytes | None
    value: bytes | None
    headers: Headers
    """The record's own."""
    request: Request | None
    """What can be read of the request; None: nothing, or the payload was cut."""

    @property
    def place(self) -> str:
        """Where the letter stands in the dead topic: ``partition/offset``."""
        return f"{self.at.partition}/{self.at.offset}"

    @property
    def key_text(self) -> str:
        """The record's own key as text; "": it has none."""
        return _text(self.key)

    @property
    def unreadable(self) -> bool:
        """Whether no request can be read in the record: tried again it ends the same way."""
        return self.reason in UNREADABLE if self.cut_bytes is not None else self.request is None

    @property
    def size_bytes(self) -> int:
        """Size of the payload before any cut."""
        return len(self.value or b"") if self.cut_bytes is None else self.cut_bytes

    @property
    def request_key(self) -> str:
        """headrace's key of the request; "": the payload was cut and no header tells."""
        if self.request is not None and self.request.id is not None:
            return identity.request_key(self.request.source, self.request.id)
        if self.cut_bytes is not None and not self.unreadable:
            return _text(dict(self.headers).get(Header.KEY))
        return identity.record_key(*self.origin) if self.origin is not None else ""


def read(record: Record) -> DeadLetterView:
    """A record of the dead topic, understood as far as it can be. Never raises."""
    found = dict(record.headers)  # of two equal names the last wins: ours stand behind the record's own
    topic, partition, offset = _text(found.get(TOPIC)), number(found.get(PARTITION)), number(found.get(OFFSET))
    at_ms, cut_bytes = number(found.get(AT_MS)), number(found.get(CUT_BYTES))
    request, error, _ = messages.parse_request(record.value)
    return DeadLetterView(
        at=Place(record.topic, record.partition, record.offset),
        origin=Place(topic, partition, offset) if topic and partition is not None and offset is not None else None,
        reason=_text(found.get(REASON)),
        message=_text(found.get(MESSAGE)),
        attempts=number(found.get(ATTEMPTS)),
        at_ms=max(0, record.timestamp_ms) if at_ms is None or at_ms > _LAST_MS else at_ms,
        cut_bytes=cut_bytes,
        key=record.key,
        value=record.value,
        headers=_own(record.headers),
        request=None if cut_bytes is not None or (error is not None and error.code in UNREADABLE) else request,
    )


def to_replay(value: bytes | None, headers: Headers, now_ms: int) -> tuple[bytes | None, Headers]:
    """Value and headers with which a record is tried again: our headers are gone, and deadlines that have passed.

    A value without a passed deadline stays as it is, byte by byte.
    """
    headers = _own(headers)
    deadline_ms = number(dict(headers).get(Header.DEADLINE_MS))
    if deadline_ms is not None and deadline_ms < now_ms:
        headers = [(name, text) for name, text in headers if name != Header.DEADLINE_MS]
    deadline = messages.parse_request(value).request.deadline
    if value is not None and deadline is not None and deadline.timestamp() * 1000 < now_ms:
        value = _without_deadline(value)
    return value, headers


def _without_deadline(value: bytes) -> bytes:
    """The same request without its deadline; as it is where Python's parser does not go that deep."""
    try:
        fields = json.loads(value)  # unlike orjson it keeps lone surrogates and every digit
        del fields["deadline"]
        return json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(fields).encode()
    except RecursionError:
        return value


def _own(headers: Headers) -> Headers:
    return [(name, value) for name, value in headers if not name.startswith(PREFIX)]


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "replace")


def _size(headers: Headers) -> int:
    return sum(len(name.encode("utf-8", "replace")) + len(value or b"") + 8 for name, value in headers)
