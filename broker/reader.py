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
_AHEAD_KBYTES = 32_768


class Reader:
    """One reader; one thread, and one ``records`` at a time. Connects at first use.

    Every method raises ``TransientError`` when no broker answers within ``kafka.request_timeout_s``, and
    ``FatalError`` when the broker refuses.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._timeout_s = settings.kafka.request_timeout_s
        over = {"enable.partition.eof": True, "queued.max.messages.kbytes": _AHEAD_KBYTES}
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
        bounds = {partition: self._bounds(topic, partition) for partition in range(count)}
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
                yield _record(message)

    def record(self, topic: str, partition: int, offset: int) -> Record | None:
        """The record at one place; None: nothing stands there (any more)."""
        if not 0 <= partition < self.partitions(topic):
            return None
        first, end = self._bounds(topic, partition)
        if not first <= offset < end:
            return None
        self._consumer.assign([ck.TopicPartition(topic, partition, offset)])
        message = self._next()
        self._consumer.unassign()
        return _record(message) if message.error() is None and message.offset() == offset else None

    def close(self) -> None:
        self._consumer.close()

    def _bounds(self, topic: str, partition: int) -> tuple[int, int]:
        try:
            first, end = self._consumer.get_watermark_offsets(
                ck.TopicPartition(topic, partition), timeout=self._timeout_s
            )
        except ck.KafkaException as error:
            raise self._refused(f"topic {topic}, partition {partition}", error.args[0]) from error
        return first, end

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
            if error.code() in _GONE or error.fatal():
                raise self._refused(f"topic {message.topic()}", error)
            if time.monotonic() >= deadline:
                raise config.unreachable(self._settings, error.str())

    def _refused(self, what: str, error: Any) -> Exception:
        if error.code() in config.NOT_REACHED:
            return config.unreachable(self._settings, error.str())
        return FatalError(f"{what}: {error.str()}")


_GONE = frozenset(
    {
        ck.KafkaError.UNKNOWN_TOPIC_OR_PART,
        ck.KafkaError._UNKNOWN_TOPIC,
        ck.KafkaError._UNKNOWN_PARTITION,
        ck.KafkaError.TOPIC_AUTHORIZATION_FAILED,
        ck.KafkaError.GROUP_AUTHORIZATION_FAILED,
    }
)


def _record(message: Any) -> Record:
    return Record(
        message.topic(),
        message.partition(),
        message.offset(),
        message.timestamp()[1],
        message.key(),
        message.value(),
        message.headers() or [],
    )
