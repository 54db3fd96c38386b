"""The backend over confluent-kafka (librdkafka): the fast one, and the default."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import confluent_kafka as ck

from broker import config
from broker.publisher import Publisher
from broker.reader import GONE, bounds_of, record_of
from contract import logs
from contract.errors import FatalError
from contract.settings import Settings
from producers.backends import Backend, Done, Headers, Producer, Reader, Record, Since

_SLICE_S = 0.1
_BATCH_RECORDS = 500


class ConfluentBackend(Backend):
    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def producer(self) -> Producer:
        return ConfluentProducer(self._settings)

    def read_partition(self, topic: str, partition: int) -> Reader:
        consumer = self._consumer(None, "latest")
        with _Closing(consumer):
            at = self._offset(consumer, topic, partition, "latest")
            consumer.assign([ck.TopicPartition(topic, partition, at)])
        return ConfluentReader(consumer, grouped=False)

    def read_topic(self, topic: str, since: Since, group: str | None) -> Reader:
        consumer = self._consumer(group, since)
        with _Closing(consumer):
            count = self._partitions(consumer, topic)
            reader = ConfluentReader(consumer, grouped=group is not None)
            if group is None:
                consumer.assign(
                    [ck.TopicPartition(topic, p, self._offset(consumer, topic, p, since)) for p in range(count)]
                )
            else:
                consumer.subscribe([topic], on_assign=reader.assigned, on_revoke=reader.revoked, on_lost=reader.revoked)
        return reader

    def _consumer(self, group: str | None, since: Since) -> Any:
        # librdkafka commits by clock, and on a rebalance, what ``done`` has stored; it wants a group id anyhow.
        over: dict[str, Any] = {"auto.offset.reset": since, "enable.partition.eof": True}
        if group is not None:
            over |= {"enable.auto.commit": True, "auto.commit.interval.ms": 1_000}
        name = group or f"{self._settings.topics.prefix}.client"
        return config.connect(ck.Consumer, config.consumer_config(self._settings, name, **over))

    def _partitions(self, consumer: Any, topic: str) -> int:
        try:
            found = consumer.list_topics(timeout=self._settings.kafka.request_timeout_s).topics.get(topic)
        except ck.KafkaException as error:
            consumer.poll(0)
            raise config.unreachable(self._settings, error) from error
        if found is None:
            raise FatalError(f"topic {topic} does not exist: run `headrace topics create`")
        return len(found.partitions)

    def _offset(self, consumer: Any, topic: str, partition: int, since: Since) -> int:
        first, end = bounds_of(self._settings, consumer, topic, partition)
        return first if since == "earliest" else end


class ConfluentProducer(Producer):
    """A ``Publisher`` and the thread that polls it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._publisher = Publisher(settings, linger_ms=settings.client.linger_ms)
        self._publisher.start()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-deliveries", daemon=True)
        self._thread.start()

    def produce(
        self,
        topic: str,
        key: bytes | None,
        value: bytes,
        headers: Headers,
        done: Done,
        partition: int | None = None,
    ) -> None:
        self._publisher.publish(topic, key, value, headers, partition, done)

    def partition_counts(self, timeout_s: float) -> Mapping[str, int]:
        try:
            return self._publisher.partitions(timeout_s)
        except ck.KafkaException as error:
            raise config.unreachable(self._settings, error) from error

    def learn(self, topic: str) -> None:
        pass  # librdkafka's own thread does

    def flush(self, timeout_s: float) -> bool:
        return self._publisher.flush(timeout_s) == 0

    def close(self, timeout_s: float) -> None:
        if self._closed.is_set():
            return
        self._publisher.close(timeout_s)
        self._closed.set()
        self._thread.join(10 * _SLICE_S)
        self._tell(0)

    def _run(self) -> None:
        while not self._closed.is_set():
            self._tell(_SLICE_S)

    def _tell(self, wait_s: float) -> None:
        acknowledged, failures = self._publisher.poll(wait_s)
        for done in acknowledged:
            done(None)
        for failure in failures:
            failure.token(failure)


class ConfluentReader(Reader):
    def __init__(self, consumer: Any, *, grouped: bool) -> None:
        self._consumer = consumer
        self._grouped = grouped
        self._assigned = not grouped
        self._at_end: set[int] = set()
        self._error: FatalError | None = None
        self._log = logs.get("producers")
        self._closed = False

    def poll(self, timeout_s: float) -> list[Record]:
        if self._error is not None:
            raise self._error
        records = []
        # consume() waits for a full batch until its timeout: wait for the first record, then take what is there.
        first = self._consumer.poll(timeout_s)
        if first is None:
            return []
        for message in [first, *self._consumer.consume(_BATCH_RECORDS, 0)]:
            error = message.error()
            if error is None:
                self._at_end.discard(message.partition())
                records.append(record_of(message))
            elif error.code() == ck.KafkaError._PARTITION_EOF:
                self._at_end.add(message.partition())
            elif error.code() in GONE or error.fatal():
                self._error = FatalError(f"topic {message.topic()}: {error.str()}")
            else:  # librdkafka tries again by itself
                self._log.warning("reader.error", code=error.name(), text=error.str())
        if self._error is not None and not records:
            raise self._error
        return records

    def at_end(self) -> bool:
        return self._assigned and all(tp.partition in self._at_end for tp in self._consumer.assignment())

    def done(self, record: Record) -> None:
        if not self._grouped:
            return
        try:
            self._consumer.store_offsets(offsets=[ck.TopicPartition(record.topic, record.partition, record.offset + 1)])
        except ck.KafkaException as error:  # the partition has moved to another member, which reads it again
            self._log.info("reader.not_ours", partition=record.partition, text=error.args[0].str())

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._consumer.close()

    def assigned(self, _consumer: Any, partitions: list[Any]) -> None:
        self._assigned = True
        self._at_end -= {tp.partition for tp in partitions}

    def revoked(self, _consumer: Any, partitions: list[Any]) -> None:
        self._at_end -= {tp.partition for tp in partitions}


class _Closing:
    """Closes the consumer when setting it up fails."""

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._consumer.close()
