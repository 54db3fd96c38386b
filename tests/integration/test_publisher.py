"""The worker's publisher against a real broker."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import confluent_kafka as ck
import pytest

from broker import config, records, topics
from broker.publisher import Failure, FailureKind, Publisher
from contract import settings as contract_settings
from contract.settings import Settings

LIMIT = 20_000


@pytest.fixture
def broker_settings(kafka: str, topic_prefix: str) -> Settings:
    settings = contract_settings.build(
        {
            "kafka": {"bootstrap_servers": kafka, "delivery_timeout_s": 20},
            "topics": {"prefix": topic_prefix, "partitions": 3, "reply_partitions": 3, "max_message_bytes": LIMIT},
        }
    )
    topics.ensure(settings)
    return settings


@pytest.fixture
def publisher(broker_settings: Settings) -> Iterator[Publisher]:
    publisher = Publisher(broker_settings)
    publisher.start()
    yield publisher
    publisher.close(10)


def collect(publisher: Publisher, count: int, timeout_s: float = 30) -> tuple[list[Any], list[Failure]]:
    acknowledged: list[Any] = []
    failed: list[Failure] = []
    deadline = time.monotonic() + timeout_s
    while len(acknowledged) + len(failed) < count:
        assert time.monotonic() < deadline, f"{len(acknowledged)} acknowledged, {len(failed)} failed of {count}"
        more, failures = publisher.poll(0.1)
        acknowledged += more
        failed += failures
    return acknowledged, failed


def read_all(settings: Settings, topic: str, count: int) -> list[Any]:
    consumer = ck.Consumer(config.consumer_config(settings, "readers"))
    partitions = consumer.list_topics(topic, timeout=10).topics[topic].partitions
    consumer.assign([ck.TopicPartition(topic, partition, ck.OFFSET_BEGINNING) for partition in partitions])
    found: list[Any] = []
    deadline = time.monotonic() + 30
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count}"
        found += [message for message in consumer.consume(500, 0.2) if message.error() is None]
    consumer.close()
    return found


def sized(size_bytes: int, headers: records.Headers = ()) -> bytes:
    """A value whose record, alone under key ``k``, is ``size_bytes``."""
    value = b"v" * size_bytes
    return value[: len(value) - (records.record_bytes(b"k", value, headers) - size_bytes)]


def test_every_token_comes_back_once_and_records_keep_their_order(
    broker_settings: Settings, publisher: Publisher
) -> None:
    topic = broker_settings.names.results
    for number in range(5_000):
        key = f"key-{number % 7}".encode()
        publisher.publish(topic, key, str(number).encode(), [("h", b"1"), ("null", None)], token=number)
    acknowledged, failed = collect(publisher, 5_000)
    assert failed == []
    assert sorted(acknowledged) == list(range(5_000))
    assert publisher.poll() == ([], [])
    by_key: dict[bytes, list[int]] = {}
    for message in read_all(broker_settings, topic, 5_000):
        by_key.setdefault(message.key(), []).append(int(message.value()))
        assert message.headers() == [("h", b"1"), ("null", None)]
    assert len(by_key) == 7
    assert all(numbers == sorted(numbers) for numbers in by_key.values())


def test_chosen_partition_is_used(broker_settings: Settings, publisher: Publisher) -> None:
    publisher.publish(broker_settings.names.replies, b"k", b"v", [], partition=2)
    collect(publisher, 1)
    (message,) = read_all(broker_settings, broker_settings.names.replies, 1)
    assert message.partition() == 2


@pytest.mark.parametrize("off", [-1, 0])
def test_record_up_to_the_limit_is_taken_to_the_byte(broker_settings: Settings, publisher: Publisher, off: int) -> None:
    publisher.publish(broker_settings.names.results, b"k", sized(LIMIT + off), [], token="t")
    assert collect(publisher, 1) == (["t"], [])


def test_record_one_byte_over_fails_at_once_and_its_neighbours_do_not(
    broker_settings: Settings, publisher: Publisher
) -> None:
    topic = broker_settings.names.results
    publisher.publish(topic, b"k", b"before", [], token="before")
    publisher.publish(topic, b"k", sized(LIMIT + 1), [], token="large")
    publisher.publish(topic, b"k", b"after", [], token="after")
    begun = time.monotonic()
    acknowledged, failed = collect(publisher, 3)
    assert time.monotonic() - begun < 5
    assert sorted(acknowledged) == ["after", "before"]
    assert [(failure.token, failure.kind) for failure in failed] == [("large", FailureKind.TOO_LARGE)]


def test_broker_agrees_with_our_count_one_byte_over(
    broker_settings: Settings, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "fits", lambda *_: True)
    publisher.publish(broker_settings.names.results, b"k", sized(LIMIT + 1), [], token="large")
    _, failed = collect(publisher, 1)
    assert [failure.kind for failure in failed] == [FailureKind.TOO_LARGE]


def test_many_large_records_never_make_a_batch_the_topic_refuses(
    broker_settings: Settings, publisher: Publisher
) -> None:
    for number in range(300):
        publisher.publish(broker_settings.names.results, b"k", b"v" * (LIMIT // 3), [], token=number)
    acknowledged, failed = collect(publisher, 300)
    assert failed == []
    assert acknowledged == list(range(300))


def test_dead_letter_of_the_largest_request_fits(broker_settings: Settings, publisher: Publisher) -> None:
    headers = [("reason", b"r" * 20_000), ("origin", b"o" * 20_000)]
    publisher.publish(broker_settings.names.dead, b"k", sized(LIMIT), headers, token="dead")
    assert collect(publisher, 1) == (["dead"], [])


def test_missing_partition_is_refused_for_good(broker_settings: Settings, publisher: Publisher) -> None:
    publisher.publish(broker_settings.names.results, b"k", b"v", [], token="warm")
    collect(publisher, 1)
    publisher.publish(broker_settings.names.results, b"k", b"v", [], partition=99, token="gone")
    _, failed = collect(publisher, 1)
    assert [(failure.token, failure.kind) for failure in failed] == [("gone", FailureKind.REFUSED)]


def test_broker_that_never_answers_gives_the_token_back_as_retriable() -> None:
    settings = contract_settings.build({"kafka": {"bootstrap_servers": "127.0.0.1:9", "delivery_timeout_s": 1}})
    publisher = Publisher(settings)
    publisher.start()
    publisher.publish("t", b"k", b"v", [], token="t")
    _, failed = collect(publisher, 1, 10)
    assert [(failure.token, failure.kind) for failure in failed] == [("t", FailureKind.RETRIABLE)]
    assert publisher.close(1) == 0


def test_close_gives_up_what_cannot_be_delivered_and_says_how_many() -> None:
    settings = contract_settings.build({"kafka": {"bootstrap_servers": "127.0.0.1:9", "delivery_timeout_s": 60}})
    publisher = Publisher(settings)
    assert publisher.close(1) == 0  # never started
    publisher.start()
    for number in range(3):
        publisher.publish("t", b"k", b"v", [], token=number)
    begun = time.monotonic()
    assert publisher.close(0.2) == 3
    assert time.monotonic() - begun < 5
    acknowledged, failed = publisher.poll()
    assert acknowledged == []
    assert sorted(failure.token for failure in failed) == [0, 1, 2]
