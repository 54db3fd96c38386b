"""Client properties for confluent-kafka (librdkafka's names), from settings.

Precedence: what the caller passes, then ``kafka.consumer`` or ``kafka.producer``, then
``kafka.properties``, then the defaults here. Properties on which a promise of headrace rests (no offset
before its outcome, no acknowledgement before the copies, equal partitioning) cannot be passed
through with another value: that is a ``SettingsError``.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import confluent_kafka as ck

from contract import logs
from contract.errors import SettingsError, TransientError
from contract.settings import Settings

Properties = dict[str, Any]
Client = TypeVar("Client")

LARGEST_RECORD_BYTES = 1_000_000_000
"""librdkafka's own bound."""
DEAD_ROOM_BYTES = 65_536
"""How much larger a dead letter may be than a request: its origin, reason and attempts always fit."""
_BATCH_BYTES = 1_000_000
_BUFFER_KBYTES = 262_144
_RECEIVE_BYTES = 100_000_000
_FETCH_BYTES = 52_428_800
_AHEAD_KBYTES = 4_096
"""Fetched ahead of each consumer: seconds of work, and the most that a backlog adds to a worker's memory."""
_AHEAD_LOOK_MS = 20
"""Between looks at whether that has room again; the default of 1 s would make it the most that is read in a second."""
_SAME_LINE_S = 10.0
_SECRET = re.compile(r"password|secret|\.pem|oauthbearer")

_ALL = ("all", "-1")
_TRUE = ("true", "1", "t", "on", "yes")
_FALSE = ("false", "0", "f", "off", "no")
# property → values that keep the promise (lower case), the promise
PRODUCER_PROMISES: dict[str, tuple[tuple[str, ...], str]] = {
    "acks": (_ALL, "producers always wait for all in-sync copies"),
    "request.required.acks": (_ALL, "producers always wait for all in-sync copies"),
    "enable.idempotence": (_TRUE, "producers are always idempotent"),
    "partitioner": (("murmur2_random",), "all clients must choose equal partitions"),
}
CONSUMER_PROMISES: dict[str, tuple[tuple[str, ...], str]] = {
    "enable.auto.commit": (_FALSE, "an offset is committed only when its outcome is durable"),
    "enable.auto.offset.store": (_FALSE, "an offset is stored only when its outcome is durable"),
}


def dead_message_bytes(settings: Settings) -> int:
    """Limit of the dead-letter topic, in bytes of one record in a batch of its own."""
    return min(settings.topics.max_message_bytes + DEAD_ROOM_BYTES, LARGEST_RECORD_BYTES)


def consumer_config(settings: Settings, group_id: str, **over: Any) -> Properties:
    """Properties of a consumer that commits by hand. ``over`` (properties, callbacks) wins over everything."""
    kafka = settings.kafka
    largest = dead_message_bytes(settings)
    fetch_bytes = max(_FETCH_BYTES, largest)
    if kafka.group_protocol == "consumer":  # the broker then sets session timeout and assignor
        group: Properties = {"group.protocol": "consumer"}
    else:
        group = {
            "partition.assignment.strategy": "cooperative-sticky",
            "session.timeout.ms": kafka.session_timeout_ms,
            # Survivors hear of a death, and of each step of a rebalance, by their next heartbeat.
            "heartbeat.interval.ms": min(500, kafka.session_timeout_ms // 3),
            "max.poll.interval.ms": max(300_000, kafka.session_timeout_ms),
        }
    defaults = {
        "group.id": group_id,
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "message.max.bytes": largest,
        "fetch.max.bytes": fetch_bytes,
        "queued.max.messages.kbytes": _AHEAD_KBYTES,
        "fetch.queue.backoff.ms": _AHEAD_LOOK_MS,
        "receive.message.max.bytes": max(_RECEIVE_BYTES, fetch_bytes + 1_024),
        **group,
    }
    return _common(settings) | defaults | passed(settings, "consumer", CONSUMER_PROMISES) | over


def producer_config(settings: Settings, **defaults: Any) -> Properties:
    """Properties of an idempotent producer. ``defaults`` are the caller's; a pass-through wins over them.

    A batch never exceeds the request topics' limit: a broker refuses a batch that does, whole.
    """
    largest = dead_message_bytes(settings)
    ours = {
        "acks": "all",
        "enable.idempotence": True,
        "partitioner": "murmur2_random",
        "linger.ms": settings.client.linger_ms,
        "batch.size": min(_BATCH_BYTES, settings.topics.max_message_bytes),
        "message.max.bytes": largest,
        "queue.buffering.max.kbytes": max(_BUFFER_KBYTES, 2 * largest // 1_024),
        "delivery.timeout.ms": max(int(settings.kafka.delivery_timeout_s * 1_000), settings.client.linger_ms + 1),
    }
    return _common(settings) | ours | defaults | passed(settings, "producer", PRODUCER_PROMISES)


def admin_config(settings: Settings) -> Properties:
    """Properties of an admin client."""
    return _common(settings) | passed(settings, "admin", {})


def connect(kind: Callable[[Properties], Client], properties: Properties) -> Client:
    """A client of ``kind`` (``ck.Consumer``, …). A property that librdkafka refuses is a ``SettingsError``."""
    try:
        return kind(properties)
    except (ck.KafkaException, TypeError, ValueError) as error:
        reason = error.args[0].str() if isinstance(error, ck.KafkaException) else str(error)
        name = next((name for name in sorted(properties, key=len, reverse=True) if name in reason), "properties")
        raise SettingsError(f"kafka.{name}", shown(name, properties.get(name)), reason) from None


def shown(name: str, value: object) -> object:
    """``value`` as an error message may show it: never a secret."""
    return "(hidden)" if _SECRET.search(name) else value


NOT_REACHED = frozenset(
    {ck.KafkaError._TIMED_OUT, ck.KafkaError._TRANSPORT, ck.KafkaError._ALL_BROKERS_DOWN, ck.KafkaError._RESOLVE}
)
"""Codes that mean "no broker answered"."""


def unreachable(settings: Settings, reason: object) -> TransientError:
    """The one error for a broker that did not answer an admin call or look-up in time."""
    text = reason.args[0].str() if isinstance(reason, ck.KafkaException) else str(reason) or type(reason).__name__
    kafka = settings.kafka
    return TransientError(
        f"no answer from {kafka.bootstrap_servers} within {kafka.request_timeout_s:g} s "
        f"(kafka.bootstrap_servers, kafka.request_timeout_s): {text}",
        code="broker_unreachable",
    )


def passed(settings: Settings, kind: str, promises: Mapping[str, tuple[tuple[str, ...], str]]) -> Properties:
    """The user's properties for one kind of client, flat. Raises ``SettingsError`` on a broken promise."""
    kafka = settings.kafka
    specific = {"consumer": kafka.consumer, "producer": kafka.producer}.get(kind, {})
    merged: Properties = {}
    for table, properties in (("properties", kafka.properties), (kind, specific)):
        for name, value in flat(properties).items():
            kept = promises.get(name)
            if kept is not None and str(value).lower() not in kept[0]:
                raise SettingsError(f"kafka.{table}.{name}", value, f"leave it out: {kept[1]}")
            merged[name] = value
    return merged


def flat(properties: Mapping[str, Any], prefix: str = "") -> Properties:
    """``{"ssl": {"ca": {"location": x}}}``, which TOML makes of an unquoted name, as ``ssl.ca.location``."""
    found: Properties = {}
    for name, value in properties.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found


def _common(settings: Settings) -> Properties:
    return {
        "bootstrap.servers": settings.kafka.bootstrap_servers,
        "client.id": "headrace",
        "socket.keepalive.enable": True,
        "reconnect.backoff.max.ms": 2_000,
        "log.connection.close": False,
        "logger": ClientLog(),
    }


class ClientLog:
    """librdkafka's own log lines as structured events, on the thread that polls its client.

    While a broker is down librdkafka repeats itself several times a second: of lines of one kind, one in
    ten seconds is shown, with the number of those that were not.
    """

    def __init__(self) -> None:
        self._log = logs.get("broker")
        self._shown: dict[str, tuple[float, int]] = {}

    def log(self, level: int, _format: str, facility: str, client: str, text: str) -> None:
        """Called by confluent-kafka from C. Never raises: that would lose records already taken."""
        with contextlib.suppress(Exception):
            now = time.monotonic()
            shown, hidden = self._shown.get(facility, (float("-inf"), 0))
            if now - shown < _SAME_LINE_S:
                self._shown[facility] = (shown, hidden + 1)
                return
            self._shown[facility] = (now, 0)
            self._log.log(level, "kafka_client", facility=facility, client=client, text=text, hidden=hidden)
