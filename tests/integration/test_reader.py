"""Reading what a topic holds now, and single records, from a real broker."""

from __future__ import annotations

from collections.abc import Iterator

import confluent_kafka as ck
import pytest
from confluent_kafka import admin

from broker import config, topics
from broker.publisher import Publisher
from broker.reader import Reader
from broker.records import Record
from contract.errors import FatalError, TransientError
from contract.settings import Settings
from tests.integration.kit import build


@pytest.fixture
def one(kafka: str, topic_prefix: str) -> Settings:
    settings = build(kafka, topic_prefix, "confluent")
    topics.ensure(settings)
    return settings


@pytest.fixture
def reader(one: Settings) -> Iterator[Reader]:
    reader = Reader(one)
    yield reader
    reader.close()


def put(settings: Settings, values: list[bytes], partition: int = 0) -> None:
    publisher = Publisher(settings)
    publisher.start()
    for value in values:
        publisher.publish(settings.names.dead, None, value, [("h", None)], partition)
    assert publisher.close(30) == 0


def test_all_partitions_are_read_to_their_end_as_it_was_and_no_further(one: Settings, reader: Reader) -> None:
    put(one, [b"0-%d" % n for n in range(50)], 0)
    put(one, [b"2-%d" % n for n in range(50)], 2)
    found: list[Record] = []
    for record in reader.records(one.names.dead):
        if not found:
            put(one, [b"late"], 0)
            put(one, [b"late"], 1)
        found.append(record)
    for partition in (0, 2):
        values = [record.value for record in found if record.partition == partition]
        assert values == [b"%d-%d" % (partition, n) for n in range(50)]
    assert len(found) == 100
    assert found[0].headers == [("h", None)]
    assert sum(record.value == b"late" for record in reader.records(one.names.dead)) == 2


def test_end_of_a_partition_that_no_record_stands_at_is_found(one: Settings, reader: Reader) -> None:
    producer = ck.Producer(config.producer_config(one) | {"transactional.id": one.topics.prefix})
    producer.init_transactions(30)
    for ends, values in ((producer.commit_transaction, [b"a", b"b"]), (producer.abort_transaction, [b"c"])):
        producer.begin_transaction()
        for value in values:
            producer.produce(one.names.dead, value, partition=1)
        producer.flush(30)
        ends(30)
    assert [record.value for record in reader.records(one.names.dead)] == [b"a", b"b"]
    assert reader.record(one.names.dead, 1, 2) is None  # the first transaction's mark


def test_record_is_found_by_its_place_and_one_that_is_gone_is_none(one: Settings, reader: Reader) -> None:
    put(one, [b"%d" % n for n in range(5)], 1)
    place = ck.TopicPartition(one.names.dead, 1, 2)
    client = admin.AdminClient(config.admin_config(one))
    for future in client.delete_records([place]).values():
        future.result(timeout=10)
    found = [reader.record(one.names.dead, 1, offset) for offset in range(6)]
    assert [record and record.value for record in found] == [None, None, b"2", b"3", b"4", None]
    assert reader.record(one.names.dead, 2, 0) is None
    assert reader.record(one.names.dead, 3, 0) is None
    assert reader.record("no-such-topic", 0, 0) is None


def test_topic_that_is_missing_is_an_error_that_says_what_to_do(reader: Reader) -> None:
    with pytest.raises(FatalError, match="topics create"):
        next(reader.records("no-such-topic"))


def test_broker_that_is_away_is_an_error_within_the_time_limit() -> None:
    reader = Reader(build("127.0.0.1:9", "away", "confluent", kafka={"request_timeout_s": 1}))
    with pytest.raises(TransientError, match="request_timeout_s"):
        next(reader.records("any"))
    reader.close()
