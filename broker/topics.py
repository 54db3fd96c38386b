"""The topics of one installation: what they must be, creating those that are missing, comparing those that are there.

``ensure`` never alters a topic that exists; ``check`` tells the command that does.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any

import confluent_kafka as ck
from confluent_kafka import admin

from broker import config
from contract.errors import FatalError
from contract.settings import Settings

_HOUR_MS = 3_600_000
_LOOK_AGAIN_S = 0.05


@dataclasses.dataclass(frozen=True, slots=True)
class Topic:
    """What one topic must be. ``properties`` are topic properties under Kafka's names."""

    name: str
    partitions: int
    replication: int
    properties: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What ``ensure`` found and did: topic names."""

    created: tuple[str, ...]
    existing: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Mismatch:
    """One property of one topic that is not what settings ask for, and the command that mends it."""

    topic: str
    property: str
    found: str
    wanted: str
    command: str

    def __str__(self) -> str:
        return f"{self.topic}: {self.property} is {self.found}, wanted {self.wanted}; mend it: {self.command}"


def wanted(settings: Settings) -> list[Topic]:
    """Every topic that ``settings`` need. Pure."""
    topics, names = settings.topics, settings.names
    common = {"min.insync.replicas": str(topics.min_insync_replicas)}
    logged = common | {
        "cleanup.policy": "delete",
        "retention.ms": str(round(topics.results_retention_hours * _HOUR_MS)),
        "max.message.bytes": str(topics.max_message_bytes),
    }
    request = logged | {
        "retention.ms": str(round(topics.retention_hours * _HOUR_MS)),
        "message.timestamp.type": "LogAppendTime",  # honest head age; a record's day is stable over redelivery
    }
    dead = logged | {"max.message.bytes": str(config.dead_message_bytes(settings))}
    control = common | {"cleanup.policy": "compact", "max.message.bytes": str(topics.max_message_bytes)}
    shared = [
        Topic(names.results, topics.partitions, topics.replication, logged),
        Topic(names.replies, topics.reply_partitions, topics.replication, logged),
        Topic(names.dead, topics.partitions, topics.replication, dead),
        Topic(names.control, 1, topics.replication, control),
    ]
    return [
        Topic(name, topics.partitions, topics.replication, request)
        for pool in settings.pools
        for class_name in settings.classes
        for name in names.requests(pool, class_name, list(settings.buckets.edges))
    ] + shared


def ensure(settings: Settings) -> Report:
    """Creates the topics that are missing; returns when all can be written to. Twice is harmless.

    Raises ``TransientError`` when no broker answers within ``kafka.request_timeout_s``, ``FatalError`` when
    the broker refuses a topic.
    """
    client = _Admin(settings)
    there = client.topics()
    missing = [topic for topic in wanted(settings) if topic.name not in there]
    created = client.create(missing)
    client.wait_until_led({topic.name: topic.partitions for topic in missing})
    return Report(tuple(created), tuple(topic.name for topic in wanted(settings) if topic.name not in created))


def check(settings: Settings) -> list[Mismatch]:
    """Everything about the topics that is not as settings ask; empty: all is well.

    More partitions than asked for are fine. Raises ``TransientError`` when no broker answers within
    ``kafka.request_timeout_s``.
    """
    client = _Admin(settings)
    there = client.topics()
    properties = client.properties([topic.name for topic in wanted(settings) if topic.name in there])
    found = []
    for topic in wanted(settings):
        if topic.name not in properties:
            found.append(Mismatch(topic.name, "topic", "missing", "there", "headrace topics create"))
        else:
            found += _compare(settings, topic, there[topic.name], properties[topic.name])
    return found


def _compare(settings: Settings, topic: Topic, there: Any, properties: Mapping[str, Any]) -> list[Mismatch]:
    at = f"--bootstrap-server {settings.kafka.bootstrap_servers}"
    partitions = len(there.partitions)
    replication = min((len(partition.replicas) for partition in there.partitions.values()), default=0)
    found = []
    if partitions < topic.partitions:
        command = f"kafka-topics.sh {at} --alter --topic {topic.name} --partitions {topic.partitions}"
        found.append(Mismatch(topic.name, "partitions", str(partitions), str(topic.partitions), command))
    if replication < topic.replication:
        command = f"kafka-reassign-partitions.sh {at} --execute --reassignment-json-file FILE"
        found.append(Mismatch(topic.name, "replication", str(replication), str(topic.replication), command))
    for name, value in topic.properties.items():
        actual = properties.get(name)
        if actual != value:
            command = f"kafka-configs.sh {at} --alter --topic {topic.name} --add-config {name}={value}"
            found.append(Mismatch(topic.name, name, str(actual), value, command))
    return found


class _Admin:
    """Admin calls under one deadline, ``kafka.request_timeout_s`` after construction."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._deadline = time.monotonic() + settings.kafka.request_timeout_s
        self._client = config.connect(admin.AdminClient, config.admin_config(settings))

    def _left_s(self) -> float:
        return max(0.1, self._deadline - time.monotonic())

    def topics(self) -> dict[str, Any]:
        try:
            return dict(self._client.list_topics(timeout=self._left_s()).topics)
        except ck.KafkaException as error:
            self._client.poll(0)  # shows librdkafka's own log: why the connection failed
            raise config.unreachable(self._settings, error) from error

    def create(self, topics: Iterable[Topic]) -> list[str]:
        news = [admin.NewTopic(t.name, t.partitions, t.replication, config=dict(t.properties)) for t in topics]
        if not news:
            return []
        left_s = self._left_s()
        futures = self._client.create_topics(news, operation_timeout=left_s, request_timeout=left_s)
        return [name for name, future in futures.items() if self._created(name, future)]

    def _created(self, name: str, future: Future[None]) -> bool:
        try:
            future.result(self._left_s())
        except (ck.KafkaException, TimeoutError) as error:
            if _code(error) == ck.KafkaError.TOPIC_ALREADY_EXISTS:  # somebody else was faster
                return False
            raise self._refused(f"creating topic {name}", error) from error
        return True

    def properties(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        resources = [admin.ConfigResource(admin.ResourceType.TOPIC, name) for name in names]
        if not resources:
            return {}
        found = {}
        for resource, future in self._client.describe_configs(resources, request_timeout=self._left_s()).items():
            try:
                entries = future.result(self._left_s())
            except (ck.KafkaException, TimeoutError) as error:
                if _code(error) == ck.KafkaError.UNKNOWN_TOPIC_OR_PART:  # deleted since it was listed
                    continue
                raise self._refused(f"reading the properties of topic {resource.name}", error) from error
            found[resource.name] = {name: entry.value for name, entry in entries.items()}
        return found

    def wait_until_led(self, partitions: Mapping[str, int]) -> None:
        """Until every partition has a leader: before that a producer's first records would wait for a retry."""
        while True:
            there = self.topics()
            late = [name for name, count in partitions.items() if _led(there.get(name)) < count]
            if not late:
                return
            if time.monotonic() > self._deadline:
                raise config.unreachable(self._settings, f"no leader yet for {', '.join(late)}")
            time.sleep(_LOOK_AGAIN_S)

    def _refused(self, what: str, error: Exception) -> Exception:
        if isinstance(error, TimeoutError) or _code(error) in config.NOT_REACHED:
            return config.unreachable(self._settings, error)
        return FatalError(f"{what}: {error.args[0].str()}")


def _led(topic: Any) -> int:
    return 0 if topic is None else sum(1 for partition in topic.partitions.values() if partition.leader >= 0)


def _code(error: Exception) -> int | None:
    return error.args[0].code() if isinstance(error, ck.KafkaException) else None
