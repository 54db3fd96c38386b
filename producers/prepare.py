"""From a request to the record that carries it. No I/O; time is an argument."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import os
import random
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import orjson

from broker import records
from contract import identity, messages, routing
from contract.errors import InvalidRequest
from contract.messages import Request
from contract.routing import Header
from contract.settings import Settings
from producers import estimate
from producers.estimate import Estimator


class Ticket(NamedTuple):
    """A request that a topic holds: its id (given or made), its key, its topic."""

    id: str
    key: str
    topic: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a request is sent; None: as its own fields and ``[client]`` say."""

    pool: str | None = None
    class_name: str | None = None
    bucket: str | None = None
    deadline_s: float | None = None
    reply: bool = True
    traceparent: str | None = None


class Prepared:
    """A record ready to be sent, and what its sender wants to remember of it."""

    __slots__ = ("headers", "key", "pool", "prompt_bytes", "size_bytes", "ticket", "value")

    def __init__(
        self,
        ticket: Ticket,
        key: bytes,
        value: bytes,
        headers: list[tuple[str, bytes | None]],
        pool: str,
        prompt_bytes: int,
    ) -> None:
        self.ticket = ticket
        self.key = key
        self.value = value
        self.headers = headers
        self.pool = pool
        self.prompt_bytes = prompt_bytes
        self.size_bytes = len(key) + len(value)


class Preparer:
    """Fills in, checks, routes and writes requests for one installation. Any thread."""

    def __init__(self, settings: Settings, estimator: Estimator) -> None:
        self._settings = settings
        self._estimator = estimator
        self._limit_bytes = settings.topics.max_message_bytes
        self._bucket_version = str(settings.buckets.version).encode()
        self._edges = settings.buckets.edges
        self._topics: dict[tuple[str, str, str], str] = {}

    def prepare(
        self, request: Request | Mapping[str, Any], options: Options, now_ms: int, reply_partition: int | None
    ) -> Prepared:
        """The record of ``request``. ``now_ms`` is wall time; relative deadlines count from it.

        Raises ``InvalidRequest``: wrong in type, bound or sense, unknown pool, class or bucket, or too
        large for its topic (``too_large``).
        """
        fields = _fields(request)
        client = self._settings.client
        given_id, given_source = fields.get("id"), fields.get("source")
        request_id = fields["id"] = new_id(now_ms) if given_id in (None, "") else _clean(given_id)
        source = fields["source"] = client.source if given_source in (None, "") else _clean(given_source)
        checked = _checked(fields)
        deadline_ms = _deadline_ms(checked, options, now_ms)
        if deadline_ms is not None:
            fields["deadline"] = dt.datetime.fromtimestamp(deadline_ms / 1_000, dt.UTC)
            fields.pop("deadline_ms", None)
        pool = options.pool or self._pool_of(checked.model)
        prompt_bytes = estimate.size_bytes(checked)
        tokens = self._tokens(pool, checked, prompt_bytes)
        topic = self._topic(
            pool, options.class_name or client.class_name, options.bucket or routing.bucket_of(tokens, self._edges)
        )
        key = identity.request_key(source, request_id)
        headers: list[tuple[str, bytes | None]] = [
            (Header.KEY, key.encode()),
            (Header.TOKENS, b"%d" % tokens),
            (Header.BUCKET_VERSION, self._bucket_version),
        ]
        if deadline_ms is not None:
            headers.append((Header.DEADLINE_MS, b"%d" % max(0, deadline_ms)))
        if reply_partition is not None:
            headers.append((Header.REPLY_TO, b"%d" % reply_partition))
        if options.traceparent is not None:
            headers.append((Header.TRACEPARENT, options.traceparent.encode("ascii", "replace")))
        message_key = key.encode() if checked.affinity is None else self._affinity_key(checked.affinity, key)
        value = _dump(fields)
        if not records.fits(message_key, value, headers, self._limit_bytes):
            size = records.record_bytes(message_key, value, headers)
            raise InvalidRequest(
                f"the record is {size} bytes, its topic takes {self._limit_bytes} (topics.max_message_bytes)",
                code="too_large",
            )
        return Prepared(Ticket(request_id, key, topic), message_key, value, headers, pool, prompt_bytes)

    def _pool_of(self, model: str | None) -> str:
        """The client's own pool, unless exactly one other serves the model asked for."""
        own = self._settings.client.pool
        if model is None or self._settings.pools[own].model == model:
            return own
        serving = [name for name, pool in self._settings.pools.items() if pool.model == model]
        return serving[0] if len(serving) == 1 else own

    def _tokens(self, pool: str, request: Request, prompt_bytes: int) -> int:
        known = self._settings.pools.get(pool)
        if known is None:
            raise _unknown("pool", pool, self._settings.pools)
        output = request.max_tokens or known.default_max_tokens
        return self._estimator.prompt_tokens(pool, request, prompt_bytes) + output * request.n

    def _topic(self, pool: str, class_name: str, bucket: str) -> str:
        topic = self._topics.get((pool, class_name, bucket))
        if topic is None:
            if class_name not in self._settings.classes:
                raise _unknown("class", class_name, self._settings.classes)
            if bucket not in self._edges:
                raise _unknown("bucket", bucket, self._edges)
            topic = self._topics[pool, class_name, bucket] = self._settings.names.request(pool, class_name, bucket)
        return topic

    def _affinity_key(self, affinity: str, key: str) -> bytes:
        """Equal affinities meet in few partitions; the same request always takes the same of them."""
        spread = int(key[-8:], 16) % self._settings.client.affinity_spread
        return f"{_clean(affinity)}#{spread}".encode()


# Seeded by the system once per process: asking it for each id costs more than all the rest of a request.
_noise = random.Random(os.urandom(32))
os.register_at_fork(after_in_child=lambda: _noise.seed(os.urandom(32)))


def new_id(now_ms: int) -> str:
    """A UUIDv7: in order of time, and unique over processes, forked ones too."""
    number = (now_ms & 0xFFFF_FFFF_FFFF) << 80 | _noise.getrandbits(80)
    number = number & ~(0xF000 << 64) | 0x7000 << 64
    number = number & ~(0xC000 << 48) | 0x8000 << 48
    text = f"{number:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def _fields(request: Request | Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(request, Request):
        return dict(request)
    fields: dict[str, Any] = msgspec.to_builtins(request, builtin_types=(dt.datetime,))
    return (fields.pop("extra", None) or {}) | fields


def _checked(fields: dict[str, Any]) -> Request:
    """The same strict check that the worker makes, so that what passes here is not invalid there."""
    try:
        request = msgspec.convert(fields, Request)
    except msgspec.ValidationError as error:
        raise messages.invalid_from(error) from None
    messages.check_request(request)
    return request


def _deadline_ms(request: Request, options: Options, now_ms: int) -> int | None:
    if options.deadline_s is not None:
        return now_ms + round(options.deadline_s * 1_000)
    if request.deadline is not None:
        return int(request.deadline.timestamp() * 1_000)
    return None if request.deadline_ms is None else now_ms + request.deadline_ms


def _clean(text: Any) -> Any:
    """Text as every reader will see it: a key made of anything else would not match the worker's."""
    return messages.clean_surrogates(text) if isinstance(text, str) else text


def _dump(fields: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(fields)
    except TypeError:
        pass
    try:  # lone surrogates go out escaped; the worker mends them as it does for every publisher
        return json.dumps(fields, default=_json_time, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"the request cannot be written as JSON: {error}", code="invalid_json") from None


def _json_time(value: object) -> str:
    if isinstance(value, dt.datetime):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} is not JSON")


def _unknown(what: str, name: str, known: Mapping[str, object]) -> InvalidRequest:
    param = "class_name" if what == "class" else what
    return InvalidRequest(f"no {what} {name!r}; there are: {', '.join(known)}", code=f"unknown_{what}", param=param)
