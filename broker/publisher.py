"""Publishes records and tells, by token, which are acknowledged by all in-sync copies and which failed."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import time
from typing import Any

import confluent_kafka as ck

from broker import config, records
from broker.records import Headers
from contract.settings import Settings

_SLICE_S = 0.1


class FailureKind(enum.StrEnum):
    """What a failed delivery means for its publisher."""

    TOO_LARGE = "too_large"
    """The record never fits: cut it or refuse it."""
    RETRIABLE = "retriable"
    """The broker did not acknowledge in time; it may or may not have the record."""
    REFUSED = "refused"
    """The broker said no for good: authorisation, no such topic, broken by a policy."""
    FATAL = "fatal"
    """This producer can deliver nothing any more."""


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """One record that was not acknowledged. ``code`` is Kafka's own name of the error."""

    token: Any
    kind: FailureKind
    code: str
    message: str


class Publisher:
    """An idempotent producer, acks=all. Every token given to ``publish`` comes back once, from ``poll``.

    Any thread may call any method; tokens come back to whoever polls. ``linger_ms`` is how long records
    are gathered (a pass-through wins); 0 suits an owner that publishes in bursts and then waits.

    A broker refuses a batch whole that exceeds its topic's limit. Its records are sent again one by one, so
    that only those fail as too large that are.
    """

    def __init__(self, settings: Settings, *, linger_ms: float = 0) -> None:
        self._settings = settings
        self._linger_ms = linger_ms
        self._limit_bytes = settings.topics.max_message_bytes
        self._dead_limit_bytes = config.dead_message_bytes(settings)
        self._dead_topic = settings.names.dead
        self._timeout_s = settings.kafka.delivery_timeout_s
        self._acknowledged: collections.deque[Any] = collections.deque()
        self._failed: collections.deque[Failure] = collections.deque()
        self._producer: Any = None
        self._single: Any = None
        """Sends each record in a batch of its own; made when it is first needed."""

    def start(self) -> None:
        """Makes the producer; waits for nothing. Raises ``SettingsError``. Twice is harmless."""
        if self._producer is None:
            self._producer = config.connect(
                ck.Producer, config.producer_config(self._settings, **{"linger.ms": self._linger_ms})
            )

    def publish(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        partition: int | None = None,
        token: Any = None,
    ) -> None:
        """Hands one record over. Its own fault never raises: it comes back as a ``Failure``.

        Returns at once, save when the buffer is full: then it waits for room, at most
        ``kafka.delivery_timeout_s``.
        """
        limit_bytes = self._dead_limit_bytes if topic == self._dead_topic else self._limit_bytes
        if not records.fits(key, value, headers, limit_bytes):
            self._failed.append(
                Failure(token, FailureKind.TOO_LARGE, "MSG_SIZE_TOO_LARGE", f"larger than {limit_bytes} bytes")
            )
            return
        done = functools.partial(self._delivered, token, headers)
        target = -1 if partition is None else partition
        deadline = 0.0
        while True:
            try:
                self._producer.produce(topic, value, key, target, done, headers=headers)
            except BufferError as error:
                deadline = deadline or time.monotonic() + self._timeout_s
                if time.monotonic() > deadline:
                    self._failed.append(Failure(token, FailureKind.RETRIABLE, "_QUEUE_FULL", str(error)))
                    return
                self._producer.poll(_SLICE_S)
            except ck.KafkaException as error:
                self._failed.append(failure(token, error.args[0]))
                return
            else:
                return

    def poll(self, wait_s: float = 0.0) -> tuple[list[Any], list[Failure]]:
        """Tokens acknowledged and records failed since the last poll; waits up to ``wait_s`` for the first."""
        if self._acknowledged or self._failed:
            wait_s = 0.0
        self._producer.poll(wait_s)
        if self._single is not None:
            self._single.poll(0)
        return _drain(self._acknowledged), _drain(self._failed)

    def flush(self, deadline_s: float) -> int:
        """Waits at most ``deadline_s`` until everything is delivered or failed; returns how many still are not.

        The tokens come from the next ``poll``.
        """
        ends = time.monotonic() + deadline_s
        left = int(self._producer.flush(deadline_s))
        return left if self._single is None else left + int(self._single.flush(max(0.0, ends - time.monotonic())))

    def partitions(self, timeout_s: float) -> dict[str, int]:
        """All topics and their numbers of partitions. Creates none. Raises ``ck.KafkaException``."""
        found = self._producer.list_topics(timeout=timeout_s).topics
        return {name: len(topic.partitions) for name, topic in found.items()}

    def close(self, deadline_s: float) -> int:
        """Flushes under ``deadline_s`` and gives up the rest; returns how many were given up."""
        if self._producer is None:
            return 0
        left = self.flush(deadline_s)
        if left:
            for producer in filter(None, (self._producer, self._single)):
                producer.purge()
                producer.poll(0)
        return left

    def _delivered(self, token: Any, headers: Headers, error: Any, message: Any) -> None:
        if error is None:
            self._acknowledged.append(token)
        elif error.code() in _TOO_LARGE:
            self._send_single(token, headers, message)
        else:
            self._failed.append(failure(token, error))

    def _send_single(self, token: Any, headers: Headers, message: Any) -> None:
        if self._single is None:
            properties = config.producer_config(self._settings, **{"linger.ms": 0}) | {"batch.num.messages": 1}
            self._single = config.connect(ck.Producer, properties)
        done = functools.partial(self._delivered_single, token)
        try:
            self._single.produce(
                message.topic(), message.value(), message.key(), message.partition(), done, headers=headers
            )
        except BufferError as error:
            self._failed.append(Failure(token, FailureKind.RETRIABLE, "_QUEUE_FULL", str(error)))

    def _delivered_single(self, token: Any, error: Any, _message: object) -> None:
        if error is None:
            self._acknowledged.append(token)
        else:
            self._failed.append(failure(token, error))


def _drain(queue: collections.deque[Any]) -> list[Any]:
    take = queue.popleft
    return [take() for _ in range(len(queue))]


_TOO_LARGE = frozenset({ck.KafkaError.MSG_SIZE_TOO_LARGE, ck.KafkaError.RECORD_LIST_TOO_LARGE})
# Codes for which librdkafka does not say "retriable", because it has already retried or given up itself.
_MAY_WORK_LATER = frozenset(
    {
        ck.KafkaError._MSG_TIMED_OUT,
        ck.KafkaError._TIMED_OUT,
        ck.KafkaError._TRANSPORT,
        ck.KafkaError._ALL_BROKERS_DOWN,
        ck.KafkaError._PURGE_QUEUE,
        ck.KafkaError._PURGE_INFLIGHT,
        ck.KafkaError._QUEUE_FULL,
        ck.KafkaError.NOT_ENOUGH_REPLICAS,
        ck.KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        ck.KafkaError.REQUEST_TIMED_OUT,
        ck.KafkaError.KAFKA_STORAGE_ERROR,
    }
)


def failure(token: Any, error: Any) -> Failure:
    """A delivery's ``KafkaError`` as a failure of one of the four kinds."""
    code = error.code()
    if error.fatal():
        kind = FailureKind.FATAL
    elif code in _TOO_LARGE:
        kind = FailureKind.TOO_LARGE
    elif error.retriable() or code in _MAY_WORK_LATER:
        kind = FailureKind.RETRIABLE
    else:
        kind = FailureKind.REFUSED
    return Failure(token, kind, error.name(), error.str())
