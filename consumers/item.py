"""A request in this worker's hands, from the record it came in to the outcome that leaves."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import msgspec

from contract import identity, messages
from contract.errors import InvalidRequest
from contract.messages import Request
from contract.routing import Header, Route
from contract.settings import Settings
from contract.statuses import Status
from storage.rows import AttemptRow, ResultRow

Headers = list[tuple[str, bytes | None]]


class Lease:
    """One assignment of one partition. Written by the intake thread alone, read by all.

    ``feeding``: its records may still enter the engine. A record whose lease no longer feeds is dropped
    without a trace; its new owner runs it.
    """

    __slots__ = ("completions", "epoch", "feeding", "held_before", "partition", "route", "topic")

    def __init__(
        self, topic: str, partition: int, epoch: int, route: Route, completions: collections.deque[tuple[Lease, int]]
    ) -> None:
        self.topic = topic
        self.partition = partition
        self.epoch = epoch
        self.route = route
        self.feeding = True
        self.held_before: Sequence[tuple[int, int]] | None = None
        """Offset ranges (both ends inclusive) that earlier owners held when they died or lost the partition;
        None: not yet asked. Written by the admission thread alone."""
        self.completions = completions

    def was_held(self, offset: int) -> bool:
        """Whether an earlier owner had this record in its hands when it died: this is a redelivery."""
        return any(first <= offset <= last for first, last in self.held_before or ())

    def complete(self, offset: int) -> None:
        """The outcome of ``offset`` is durable and published. Any thread."""
        self.completions.append((self, offset))

    def drop(self) -> None:
        """One of its records is given up without an outcome: it stays uncommitted. Any thread."""
        self.completions.append((self, -1))


class Item:
    """One record of a request topic and what is known about it. One owner at a time."""

    __slots__ = (
        "altered",
        "appended_ms",
        "attempts",
        "deadline_ms",
        "deaths",
        "headers",
        "invalid",
        "key",
        "lease",
        "marked",
        "offset",
        "prepared",
        "raw_key",
        "raw_value",
        "reply_to",
        "request",
        "tokens",
        "tries",
        "watched",
    )  # fmt: skip

    def __init__(
        self,
        lease: Lease,
        offset: int,
        appended_ms: int,
        raw_key: bytes | None,
        raw_value: bytes | None,
        headers: Headers,
    ) -> None:
        self.lease = lease
        self.offset = offset
        self.appended_ms = appended_ms
        self.raw_key = raw_key
        self.raw_value = raw_value
        self.headers = headers
        self.key = ""
        self.request: Request = _NO_REQUEST
        self.invalid: InvalidRequest | None = None
        self.altered = False
        self.deadline_ms: int | None = None
        self.tokens = 0
        self.reply_to: int | None = None
        self.prepared: Any = None
        self.attempts: list[AttemptRow] = []
        self.tries = 0
        """Attempts in this worker, those ended by the engine's death left out."""
        self.deaths = 0
        """Times the engine died with this request in it, or a worker that held it died; counted across workers."""
        self.watched = False
        """There is reason to suspect it: before it enters the engine, that is written down."""
        self.marked = False
        """It is written down as being in this worker's engine."""

    @property
    def record(self) -> str:
        return f"{self.lease.topic}/{self.lease.partition}/{self.offset}"


_NO_REQUEST = Request()


class Decoder:
    """Turns records into items: parse, key, deadline, token estimate, reply partition."""

    def __init__(self, settings: Settings) -> None:
        self._default_deadline_ms = {name: cls.default_deadline_ms for name, cls in settings.classes.items()}
        self._default_max_tokens = {name: pool.default_max_tokens for name, pool in settings.pools.items()}
        self._reply_partitions = settings.topics.reply_partitions

    def decode(self, item: Item) -> None:
        """Fills ``item`` from its raw parts. Never raises; a wrong record sets ``item.invalid``."""
        item.request, item.invalid, item.altered = messages.parse_request(item.raw_value)
        request, lease = item.request, item.lease
        if request.id is not None:
            item.key = identity.request_key(request.source, request.id)
        else:
            item.key = identity.record_key(lease.topic, lease.partition, item.offset)
        headers = dict(item.headers)  # of two equal names the last wins
        item.deadline_ms = self._deadline(item, headers)
        reply_to = number(headers.get(Header.REPLY_TO))
        if reply_to is not None and reply_to < self._reply_partitions:
            item.reply_to = reply_to

    def _deadline(self, item: Item, headers: dict[str, bytes | None]) -> int | None:
        request = item.request
        if request.deadline is not None:
            return int(request.deadline.timestamp() * 1000)
        if (absolute := number(headers.get(Header.DEADLINE_MS))) is not None:
            return absolute
        relative = request.deadline_ms or self._default_deadline_ms.get(item.lease.route.class_name, 0)
        return item.appended_ms + relative if relative else None

    def estimate_tokens(self, route: Route, headers: Headers, size_bytes: int) -> int:
        """Total tokens a record may cost: the publisher's header, else a guess from its size."""
        for name, value in reversed(headers):
            if name == Header.TOKENS and (tokens := number(value)) is not None:
                return tokens
        return size_bytes // 4 + self._default_max_tokens.get(route.pool, 0)


def number(value: bytes | None) -> int | None:
    """A header's value as a whole number ≥ 0; None when it cannot be read as one."""
    if value is None or not value.isdigit() or len(value) > 18:
        return None
    return int(value)


class Outcome(msgspec.Struct):
    """How an item ended, on its way to settlement."""

    item: Item
    row: ResultRow
    dead_reason: str | None = None
    """Why its bytes are also kept as a dead letter."""
    stored: bool = False
    """The row is the stored result of a duplicate: publish it, settle nothing."""
    records_left: int = 0
    """Of the records it sends, those that the broker has not acknowledged."""


class Desk:
    """Writes outcomes: knows the worker's name and epoch, so that nobody else has to carry them."""

    def __init__(self, worker: str, worker_epoch: int) -> None:
        self.worker = worker
        self.worker_epoch = worker_epoch

    def outcome(
        self,
        item: Item,
        status: Status,
        now_ms: int,
        *,
        code: str | None = None,
        message: str | None = None,
        param: str | None = None,
        dead: bool = False,
        model: str | None = None,
    ) -> Outcome:
        """The outcome of an item at wall time ``now_ms``; ``code`` and ``message`` say why it is no answer."""
        request, lease = item.request, item.lease
        row = ResultRow(
            key=item.key,
            id=request.id,
            source=request.source,
            pool=lease.route.pool,
            class_name=lease.route.class_name,
            bucket=lease.route.bucket,
            business_line=request.business_line,
            type=request.type,
            model=model,
            status=status,
            error_code=code,
            error_message=message,
            error_param=param,
            keep_output=request.store,
            altered=item.altered,
            latency_ms=max(0.0, now_ms - item.appended_ms),
            attempt=max(1, len(item.attempts)),
            worker=self.worker,
            worker_epoch=self.worker_epoch,
            tags=request.tags,
            batch_id=request.batch_id,
            custom_id=request.custom_id,
            topic=lease.topic,
            partition=lease.partition,
            offset=item.offset,
            appended_ms=item.appended_ms,
            settled_ms=now_ms,
        )
        return Outcome(item, row, dead_reason=code if dead else None)

    def invalid(self, item: Item, error: InvalidRequest, now_ms: int, *, dead: bool = False) -> Outcome:
        return self.outcome(
            item, Status.INVALID, now_ms, code=error.code, message=error.message, param=error.param, dead=dead
        )
