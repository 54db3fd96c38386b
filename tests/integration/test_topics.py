"""``headrace topics`` against a real broker."""

from __future__ import annotations

import threading
import time

import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from broker import topics
from contract import settings as contract_settings
from contract.errors import FatalError, TransientError
from contract.settings import Settings


def build(kafka: str, prefix: str, **fields: object) -> Settings:
    return contract_settings.build(
        {
            "kafka": {"bootstrap_servers": kafka},
            "topics": {"prefix": prefix, "partitions": 2, "reply_partitions": 3} | fields,
        }
    )


def check_until_any(settings: Settings) -> list[topics.Mismatch]:
    """A broker acts on an admin call a little after it has answered it."""
    deadline = time.monotonic() + 15
    while not (found := topics.check(settings)):
        assert time.monotonic() < deadline
    return found


def test_what_is_created_is_what_is_wanted_and_twice_is_harmless(kafka: str, topic_prefix: str) -> None:
    settings = build(kafka, topic_prefix)
    report = topics.ensure(settings)
    assert set(report.created) == {topic.name for topic in topics.wanted(settings)}
    assert topics.check(settings) == []
    again = topics.ensure(settings)
    assert again.created == ()
    assert set(again.existing) == set(report.created)


def test_only_the_missing_topic_is_made_again(kafka: str, topic_prefix: str) -> None:
    settings = build(kafka, topic_prefix)
    topics.ensure(settings)
    lost = settings.names.dead
    admin = AdminClient({"bootstrap.servers": kafka})
    admin.delete_topics([lost], operation_timeout=10)[lost].result(15)
    found = check_until_any(settings)
    assert [(m.topic, m.property, m.command) for m in found] == [(lost, "topic", "headrace topics create")]
    assert topics.ensure(settings).created == (lost,)


def test_two_creators_at_once_do_not_disturb_each_other(kafka: str, topic_prefix: str) -> None:
    settings = build(kafka, topic_prefix)
    created: list[str] = []

    def create() -> None:
        created.extend(topics.ensure(settings).created)

    threads = [threading.Thread(target=create) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(created) == sorted(topic.name for topic in topics.wanted(settings))
    assert topics.check(settings) == []


def test_every_difference_is_told_with_what_mends_it(kafka: str, topic_prefix: str) -> None:
    topics.ensure(build(kafka, topic_prefix))
    other = build(kafka, topic_prefix, partitions=5, retention_hours=1, max_message_bytes=50_000)
    found = {(m.topic.removeprefix(topic_prefix), m.property): m for m in topics.check(other)}
    short = ".default.online.short"
    assert set(found) >= {(short, "partitions"), (short, "retention.ms"), (short, "max.message.bytes")}
    assert (".control", "partitions") not in found
    partitions = found[short, "partitions"]
    assert (partitions.found, partitions.wanted) == ("2", "5")
    assert f"--alter --topic {topic_prefix}{short} --partitions 5" in partitions.command
    assert "--add-config retention.ms=3600000" in found[short, "retention.ms"].command


def test_clock_of_the_publisher_on_a_request_topic_is_a_mismatch(kafka: str, topic_prefix: str) -> None:
    settings = build(kafka, topic_prefix)
    topics.ensure(settings)
    topic = settings.names.request("default", "online", "short")
    change = ConfigEntry("message.timestamp.type", "CreateTime", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[change])
    admin = AdminClient({"bootstrap.servers": kafka})
    admin.incremental_alter_configs([resource])[resource].result(15)
    found = check_until_any(settings)
    assert [(m.topic, m.property, m.found, m.wanted) for m in found] == [
        (topic, "message.timestamp.type", "CreateTime", "LogAppendTime")
    ]


def test_more_partitions_than_asked_for_are_fine(kafka: str, topic_prefix: str) -> None:
    topics.ensure(build(kafka, topic_prefix, partitions=3))
    assert topics.check(build(kafka, topic_prefix, partitions=2)) == []


def test_topic_the_broker_refuses_is_named(kafka: str, topic_prefix: str) -> None:
    with pytest.raises(FatalError, match=rf"{topic_prefix}\..*replication"):
        topics.ensure(build(kafka, topic_prefix, replication=3))


@pytest.mark.parametrize("call", [topics.ensure, topics.check])
def test_no_broker_is_one_clear_error_in_time(call: object) -> None:
    settings = contract_settings.build({"kafka": {"bootstrap_servers": "127.0.0.1:9", "request_timeout_s": 1.5}})
    assert callable(call)
    begun = time.monotonic()
    with pytest.raises(TransientError, match=r"127\.0\.0\.1:9 within 1\.5 s") as caught:
        call(settings)
    assert caught.value.code == "broker_unreachable"
    assert time.monotonic() - begun < 3


def test_mismatch_reads_as_one_line() -> None:
    mismatch = topics.Mismatch("t", "p", "1", "2", "do this")
    assert str(mismatch) == "t: p is 1, wanted 2; mend it: do this"
