"""What goes into the database and comes out of it. Plain values; no I/O.

Times are integer milliseconds since the epoch (UTC); durations of engine time are integer ns.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from decimal import Decimal
from typing import NamedTuple

import msgspec
import orjson

from contract.messages import ErrorBody, Result, UsageBody, clean_text, encode_result
from contract.money import plain
from contract.statuses import Status, Waste

ZERO_USD = Decimal(0)


def day_of(time_ms: int) -> dt.date:
    """The UTC day of a time in ms since the epoch."""
    return dt.datetime.fromtimestamp(time_ms / 1000, dt.UTC).date()


class ResultRow(msgspec.Struct, kw_only=True):
    """One row of ``results``: everything a visible result says, so that a duplicate can be answered from it."""

    key: str
    generation: int = 1
    id: str | None = None
    source: str = ""
    verified: bool = False
    """Whether ``source`` and ``business_line`` were proven, not merely claimed by the message."""
    pool: str
    class_name: str
    bucket: str
    business_line: str = ""
    type: str = ""
    model: str | None = None
    status: Status
    error_code: str | None = None
    error_message: str | None = None
    error_param: str | None = None
    output: bytes | None = None
    """JSON, already free of what Postgres cannot hold."""
    altered: bool = False
    keep_output: bool = True
    """The request's ``store``: false leaves ``output`` out of the table, not out of the published result."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    usage_contradictory: bool = False
    latency_ms: float = 0.0
    queue_ms: float = 0.0
    inference_ms: float = 0.0
    charge_usd: Decimal = ZERO_USD
    degrade_level: int = 0
    attempt: int = 1
    worker: str
    worker_epoch: int
    tags: dict[str, str] | None = None
    batch_id: str | None = None
    custom_id: str | None = None
    topic: str
    partition: int
    offset: int
    appended_ms: int
    settled_ms: int = 0

    @property
    def record(self) -> str:
        """The Kafka record this row came from, as ``settled`` remembers it."""
        return f"{self.topic}/{self.partition}/{self.offset}"

    @property
    def day(self) -> dt.date:
        """The row's partition: the day of the record's append time, stable over redelivery."""
        return day_of(self.appended_ms)

    def clean(self) -> None:
        """Replaces in every text what Postgres cannot hold; sets ``altered`` where that changed something."""
        for name in (
            "id",
            "source",
            "business_line",
            "type",
            "model",
            "error_message",
            "error_param",
            "batch_id",
            "custom_id",
        ):
            text = getattr(self, name)
            if text and not (text.isascii() and "\0" not in text):
                cleaned = clean_text(text)
                if cleaned != text:
                    setattr(self, name, cleaned)
                    self.altered = True
        if self.tags:
            cleaned_tags = {clean_text(name): clean_text(value) for name, value in self.tags.items()}
            if cleaned_tags != self.tags:
                self.tags, self.altered = cleaned_tags, True

    def to_result(self, *, reference: str | None = None) -> bytes:
        """The result message as JSON. ``reference`` replaces an output too large for a record."""
        result = Result(
            key=self.key,
            generation=self.generation,
            id=self.id,
            source=self.source,
            status=self.status,
            output_ref=reference,
            model=self.model,
            usage=UsageBody(
                prompt_tokens=self.prompt_tokens, cached_tokens=self.cached_tokens, output_tokens=self.output_tokens
            ),
            latency_ms=self.latency_ms,
            queue_ms=self.queue_ms,
            inference_ms=self.inference_ms,
            cost_usd=plain(self.charge_usd),
            degrade_level=self.degrade_level,
            error=None
            if self.error_code is None
            else ErrorBody(code=self.error_code, message=self.error_message or "", param=self.error_param),
            attempt=self.attempt,
            worker=self.worker,
            altered=self.altered,
            business_line=self.business_line,
            type=self.type,
            tags=self.tags,
            batch_id=self.batch_id,
            custom_id=self.custom_id,
        )
        return encode_result(result, None if reference is not None else self.output)

    def tags_json(self) -> str | None:
        return None if not self.tags else orjson.dumps(self.tags).decode()


class AttemptRow(msgspec.Struct, kw_only=True):
    """One attempt in an engine: its share of GPU time and, for the one that won, its charge.

    Primary key (worker_epoch, seq). ``waste`` says why nobody pays; None means it answered.
    """

    worker_epoch: int
    seq: int
    number: int = 1
    waste: Waste | None = None
    allocated_ns: int
    charge_usd: Decimal = ZERO_USD
    tariff_id: int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    started_ms: int
    ended_ms: int


class Settlement(msgspec.Struct):
    """One outcome on its way into the database: a row and the attempts behind it."""

    result: ResultRow
    attempts: list[AttemptRow] = msgspec.field(default_factory=list)


class Verdict(msgspec.Struct, frozen=True):
    """What the database decided. ``result`` is the visible one: ours, with its generation, or the winner's."""

    won: bool
    result: ResultRow


@dataclasses.dataclass(frozen=True, slots=True)
class Settled:
    """A remembered key."""

    key: str
    generation: int
    status: Status
    day: dt.date
    records: tuple[str, ...]
    """The records settled under this key, ``topic/partition/offset``, one per generation, oldest first.

    A duplicate of an answer is not among them: it changes nothing.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class Suspect:
    """A request that was in an engine when it died, or in the hands of a worker that died."""

    key: str
    deaths: int
    worker_epoch: int | None
    """In whose engine it is, as far as was written down; None: in nobody's."""


class Memory(NamedTuple):
    """What is remembered of some keys."""

    settled: dict[str, Settled]
    suspects: dict[str, Suspect]


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """The offsets of one partition that a worker has in its hands, both ends inclusive."""

    topic: str
    partition: int
    first_offset: int
    last_offset: int


@dataclasses.dataclass(frozen=True, slots=True)
class TimeRow:
    """A worker's time since its previous row, by state; integer ns. Primary key (worker_epoch, seq)."""

    worker_epoch: int
    seq: int
    at_ms: int
    starting_ns: int = 0
    idle_ns: int = 0
    busy_ns: int = 0
    draining_ns: int = 0
    stalled_ns: int = 0
    rounding_ns: int = 0
    """The part of ``busy_ns`` that integer division gave to no attempt."""
