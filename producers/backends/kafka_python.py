"""The backend over kafka-python: pure Python, for places where librdkafka cannot be installed."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import kafka
from kafka import errors

from broker import config, records
from broker import kafka_python as translation
from broker.publisher import Failure, FailureKind
from contract import logs
from contract.errors import FatalError, SettingsError
from contract.settings import Settings
from producers.backends import Backend, Done, Headers, Producer, Reader, Record, Since

_BATCH_RECORDS = 500
_COMMIT_EVERY_S = 1.0
_FORCED_CLOSE_S = 2.0


class KafkaPythonBackend(Backend):
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        _forward_log()

    def producer(self) -> Producer:
        return KafkaPythonProducer(self._settings)

    def read_partition(self, topic: str, partition: int) -> Reader:
        consumer = _consumer(self._settings, None, "latest")
        with _setting_up(consumer, self._settings):
            assigned = kafka.TopicPartition(topic, partition)
            _partitions(consumer, topic)
            return KafkaPythonReader(consumer, self._settings, [assigned], "latest")

    def read_topic(self, topic: str, since: Since, group: str | None) -> Reader:
        consumer = _consumer(self._settings, group, since)
        with _setting_up(consumer, self._settings):
            partitions = [kafka.TopicPartition(topic, partition) for partition in _partitions(consumer, topic)]
            if group is None:
                return KafkaPythonReader(consumer, self._settings, partitions, since)
            reader = KafkaPythonReader(consumer, self._settings, [], since)
            consumer.subscribe([topic], listener=reader.listener)
            return reader


class KafkaPythonProducer(Producer):
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._limit_bytes = settings.topics.max_message_bytes
        self._producer = _connect(kafka.KafkaProducer, translation.producer_config(settings), settings)

    def produce(
        self,
        topic: str,
        key: bytes | None,
        value: bytes,
        headers: Headers,
        done: Done,
        partition: int | None = None,
    ) -> None:
        # Judged here, before the broker does: its refusal ends an idempotent KafkaProducer, neighbours and all.
        if not records.fits(key, value, headers, self._limit_bytes):
            text = f"larger than {self._limit_bytes} bytes"
            done(Failure(None, FailureKind.TOO_LARGE, "MessageSizeTooLargeError", text))
            return
        try:
            future = self._producer.send(topic, value, key, headers, partition)
        except (errors.KafkaError, ValueError) as error:
            done(_failure(error))
            return
        future.add_callback(_ignoring_metadata, done)
        future.add_errback(_failed, done)

    def partition_counts(self, timeout_s: float) -> Mapping[str, int]:
        consumer = _consumer(self._settings, None, "latest", timeout_s)
        with _setting_up(consumer, self._settings):
            counts = {topic: len(consumer.partitions_for_topic(topic) or ()) for topic in consumer.topics()}
        consumer.close(autocommit=False)
        return counts

    def learn(self, topic: str) -> None:
        try:
            self._producer.partitions_for(topic)
        except errors.KafkaError as error:
            raise config.unreachable(self._settings, error) from error

    def flush(self, timeout_s: float) -> bool:
        try:
            self._producer.flush(timeout_s)
        except errors.KafkaTimeoutError:
            return False
        return True

    def close(self, timeout_s: float) -> None:
        if not self.flush(timeout_s):
            # Its close() would wait for the same once more and then give up without closing.
            self._producer._sender.force_close()
            self._producer._sender.join(_FORCED_CLOSE_S)
        self._producer.close(_FORCED_CLOSE_S)


class KafkaPythonReader(Reader):
    def __init__(self, consumer: Any, settings: Settings, assigned: list[Any], since: Since) -> None:
        self._consumer = consumer
        self._timeout_ms = int(settings.kafka.request_timeout_s * 1_000)
        self._grouped = not assigned
        self._joined = False
        self._done: dict[Any, int] = {}
        self._ends: dict[Any, int] = {}
        self._next_commit = time.monotonic() + _COMMIT_EVERY_S
        self._log = logs.get("producers")
        self._closed = False
        self.listener = _Listener(self)
        if assigned:
            self._consumer.assign(assigned)
            self._ends = dict(consumer.end_offsets(assigned, self._timeout_ms))
            first = consumer.beginning_offsets(assigned, self._timeout_ms) if since == "earliest" else self._ends
            for partition in assigned:
                consumer.seek(partition, first[partition])

    def poll(self, timeout_s: float) -> list[Record]:
        try:
            found = self._consumer.poll(int(timeout_s * 1_000), _BATCH_RECORDS)
        except (errors.AuthorizationError, errors.UnknownTopicOrPartitionError) as error:
            raise FatalError(str(error)) from error
        except errors.KafkaError as error:
            self._log.warning("reader.error", code=type(error).__name__, text=str(error))
            return []
        if self._done and time.monotonic() >= self._next_commit:
            self._next_commit = time.monotonic() + _COMMIT_EVERY_S
            self._consumer.commit_async(self._take_done())
        return [_record(record) for batch in found.values() for record in batch]

    def at_end(self) -> bool:
        if self._grouped:
            if not self._joined:
                return False
            assigned = self._consumer.assignment()
            if set(self._ends) != assigned:
                self._ends = dict(self._consumer.end_offsets(list(assigned), self._timeout_ms)) if assigned else {}
        return all(self._consumer.position(partition) >= end for partition, end in self._ends.items())

    def done(self, record: Record) -> None:
        if self._grouped:
            partition = kafka.TopicPartition(record.topic, record.partition)
            if partition in self._consumer.assignment():  # else it has a new owner, who reads it again
                self._done[partition] = record.offset + 1

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._done:
            try:
                self._consumer.commit(self._take_done(), self._timeout_ms)
            except errors.KafkaError as error:  # the next owner reads them again
                self._log.warning("reader.not_committed", code=type(error).__name__, text=str(error))
        self._consumer.close(autocommit=False, timeout_ms=self._timeout_ms)

    def assigned(self) -> None:
        """The group gave us our share. Called within ``poll``, must not block."""
        self._joined = True

    async def revoked(self) -> None:
        """The group takes partitions away: what is done is committed first. Called within ``poll``."""
        self._joined = False
        if self._done:
            try:
                await self._consumer.commit_async(self._take_done())
            except errors.KafkaError as error:  # the next owner reads them again
                self._log.warning("reader.not_committed", code=type(error).__name__, text=str(error))

    def _take_done(self) -> dict[Any, Any]:
        done, self._done = self._done, {}
        return {partition: kafka.OffsetAndMetadata(offset, "", -1) for partition, offset in done.items()}


class _Listener(kafka.AsyncConsumerRebalanceListener):  # type: ignore[misc]
    def __init__(self, reader: KafkaPythonReader) -> None:
        self._reader = reader

    async def on_partitions_revoked(self, revoked: Any) -> None:
        await self._reader.revoked()

    async def on_partitions_assigned(self, assigned: Any) -> None:
        self._reader.assigned()


def _connect(kind: Callable[..., Any], properties: Mapping[str, Any], settings: Settings) -> Any:
    """A producer or consumer that has reached a broker; else nothing of it is left."""
    clients: list[Any] = []

    def network(**configs: Any) -> Any:
        clients.append(kafka.KafkaProducer.DEFAULT_CONFIG["kafka_client"](**configs))
        return clients[-1]

    try:
        return kind(**properties, kafka_client=network)
    except Exception as error:
        for client in clients:  # the library would leave its thread connecting for ever
            client.close()
        if isinstance(error, errors.KafkaError) and not isinstance(error, errors.KafkaConfigurationError):
            raise config.unreachable(settings, error) from error
        raise SettingsError("kafka.properties", "(all)", f"kafka-python refuses them: {error}") from error


def _consumer(settings: Settings, group: str | None, since: Since, timeout_s: float | None = None) -> Any:
    properties = translation.consumer_config(settings, group) | {"auto_offset_reset": since}
    if timeout_s is not None:
        properties["bootstrap_timeout_ms"] = int(timeout_s * 1_000)
    return _connect(kafka.KafkaConsumer, properties, settings)


def _partitions(consumer: Any, topic: str) -> list[int]:
    found = consumer.partitions_for_topic(topic)
    if not found:
        raise FatalError(f"topic {topic} does not exist: run `headrace topics create`")
    return sorted(found)


@contextlib.contextmanager
def _setting_up(consumer: Any, settings: Settings) -> Iterator[None]:
    """Closes the consumer when setting it up fails; a broker that does not answer is one clear error."""
    try:
        yield
    except errors.KafkaError as error:
        consumer.close(autocommit=False)
        raise config.unreachable(settings, error) from error
    except BaseException:
        consumer.close(autocommit=False)
        raise


def _ignoring_metadata(done: Done, _metadata: object) -> None:
    done(None)


def _failed(done: Done, error: BaseException) -> None:
    done(_failure(error))


_TOO_LARGE = (errors.MessageSizeTooLargeError, errors.RecordListTooLargeError)


def _failure(error: BaseException) -> Failure:
    kind = FailureKind.REFUSED
    if isinstance(error, _TOO_LARGE):
        kind = FailureKind.TOO_LARGE
    elif getattr(error, "retriable", False) or isinstance(error, errors.IllegalStateError):  # closed under way
        kind = FailureKind.RETRIABLE
    return Failure(None, kind, type(error).__name__, str(error))


def _record(record: Any) -> Record:
    return Record(
        record.topic,
        record.partition,
        record.offset,
        record.timestamp,
        record.key,
        record.value,
        list(record.headers),
    )


class _ToStructlog(logging.Handler):
    """kafka-python's own log, as the other backend's: structured, one of a kind in ten seconds."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._log = config.ClientLog()

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "kafka.net.selector" and record.levelno < logging.ERROR:
            return  # it calls every wait for the interpreter's lock a blocked loop
        self._log.log(record.levelno, "", record.name, "kafka-python", record.getMessage())


@functools.cache
def _forward_log() -> None:
    log = logging.getLogger("kafka")
    log.addHandler(_ToStructlog())
    log.propagate = False
