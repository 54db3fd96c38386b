"""Reads topics as they stand: from the first record to the present end, or one record by its place.

No group and no commit: nobody's position moves. Memory is bounded by what librdkafka fetches ahead.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import confluent_kafka as ck

from broker import config
from broker.records import Record
from contract.errors import FatalError
from contract.settings import Settings

_SLICE_S = 0.1
_LOOK_AGAIN_S = 0.05
_AHEAD_KBYTES = 32_768
_FETCH_WAIT_MS = 10
"""What is read stands there already; a longer wait at a partition's end would only hold up the next look-up."""


class Reader:
    """One reader; one thread, and one ``records`` at a time. Connects at first use.

    Every method raises ``TransientError`` when no broker answers within ``kafka.request_timeout_s``, and
    ``FatalError`` when the broker refuses.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._timeout_s = settings.kafka.request_timeout_s
        over = {
            "enable.partition.eof": True,
            "queued.max.messages.kbytes": _AHEAD_KBYTES,
            "fetch.wait.max.ms": _FETCH_WAIT_MS,
        }
        group = f"{settings.topics.prefix}.reader"
        self._consumer = config.connect(ck.Consumer, config.consumer_config(settings, group, **over))
        self._counts: dict[str, int] | None = None

    def partitions(self, topic: str) -> int:
        """How many partitions ``topic`` has, as seen at the first call; 0: there is no such topic."""
        if self._counts is None:
            try:
                found = self._consumer.list_topics(timeout=self._timeout_s).topics
            except ck.KafkaException as error:
                self._consumer.poll(0)  # shows librdkafka's own log: why the connection failed
                raise config.unreachable(self._settings, error) from error
            self._counts = {name: len(one.partitions) for name, one in found.items()}
        return self._counts.get(topic, 0)

    def records(self, topic: str) -> Iterator[Record]:
        """All records that ``topic`` holds now, each partition in order. ``FatalError``: no such topic."""
        count = self.partitions(topic)
        if not count:
            raise FatalError(f"topic {topic} does not exist: run `headrace topics create`")
        bounds = {partition: bounds_of(self._settings, self._consumer, topic, partition) for partition in range(count)}
        ends = {partition: end for partition, (first, end) in bounds.items() if first < end}
        self._consumer.assign([ck.TopicPartition(topic, partition, bounds[partition][0]) for partition in ends])
        while ends:
            message = self._next()
            partition, offset = message.partition(), message.offset()
            if partition not in ends:
                continue
            is_record = message.error() is None
            if not is_record or offset + 1 >= ends[partition]:  # the last offsets may hold no record: then it is an end
                end = ends.pop(partition)
                self._consumer.incremental_unassign([ck.TopicPartition(topic, partition)])
                is_record = is_record and offset < end
            if is_record:
                yield record_of(message)

    def record(self, topic: str, partition: int, offset: int) -> Record | None:
        """The record at one place; None: nothing stands there (any more)."""
        if not 0 <= partition < self.partitions(topic):
            return None
        first, end = bounds_of(self._settings, self._consumer, topic, partition)
        if not first <= offset < end:
            return None
        self._consumer.assign([ck.TopicPartition(topic, partition, offset)])
        message = self._next()
        self._consumer.unassign()
        return record_of(message) if message.error() is None and message.offset() == offset else None

    def close(self) -> None:
        self._consumer.close()

    def _next(self) -> Any:
        """The next message, or a partition's end. Only time spent waiting here counts towards the deadline."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            message = self._consumer.poll(_SLICE_S)
            if message is None:
                if time.monotonic() >= deadline:
                    raise config.unreachable(self._settings, "no record came")
                continue
            error = message.error()
            if error is None or error.code() == ck.KafkaError._PARTITION_EOF:
                return message
            if error.code() in GONE or error.fatal():
                raise FatalError(f"topic {message.topic()}: {error.str()}")
            if time.monotonic() >= deadline:
                raise config.unreachable(self._settings, error.str())


def bounds_of(settings: Settings, consumer: Any, topic: str, partition: int) -> tuple[int, int]:
    """Offset of a partition's first record and its end. A partition without a leader is asked again.

    Raises ``TransientError`` when there is no answer within ``kafka.request_timeout_s``, ``FatalError`` when
    the broker refuses.
    """
    deadline = time.monotonic() + settings.kafka.request_timeout_s
    while True:
        left_s = max(0.1, deadline - time.monotonic())
        try:
            first, end = consumer.get_watermark_offsets(ck.TopicPartition(topic, partition), timeout=left_s)
            return first, end
        except ck.KafkaException as error:
            code = error.args[0].code()
            if time.monotonic() >= deadline or code in config.NOT_REACHED:
                raise config.unreachable(settings, error) from error
            if code not in _MOVING:
                raise FatalError(f"topic {topic}, partition {partition}: {error.args[0].str()}") from error
        time.sleep(_LOOK_AGAIN_S)


def record_of(message: Any) -> Record:
    """A message without an error as a record."""
    return Record(
        message.topic(),
        message.partition(),
        message.offset(),
        message.timestamp()[1],
        message.key(),
        message.value(),
        message.headers() or [],
    )


# A partition that was just made or whose leader changes: asked again until the deadline.
_MOVING = frozenset(
    {
        ck.KafkaError.NOT_LEADER_FOR_PARTITION,
        ck.KafkaError.LEADER_NOT_AVAILABLE,
        ck.KafkaError.UNKNOWN_TOPIC_OR_PART,
        ck.KafkaError.KAFKA_STORAGE_ERROR,
    }
)
GONE = frozenset(
    {
        ck.KafkaError.UNKNOWN_TOPIC_OR_PART,
        ck.KafkaError._UNKNOWN_TOPIC,
        ck.KafkaError._UNKNOWN_PARTITION,
        ck.KafkaError.TOPIC_AUTHORIZATION_FAILED,
        ck.KafkaError.GROUP_AUTHORIZATION_FAILED,
    }
)
"""Codes with which a consumer tells that a topic is gone or may not be read."""
