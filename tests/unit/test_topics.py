"""What topics must be, from settings alone."""

from __future__ import annotations

from broker import topics
from contract import settings as contract_settings
from contract.routing import TopicNames


def test_every_pool_class_and_bucket_has_a_topic_and_nothing_else_is_made() -> None:
    settings = contract_settings.build(
        {"pools": {"a": {}, "b": {}}, "client": {"pool": "a"}, "worker": {"pool": "b"}, "topics": {"prefix": "p"}}
    )
    names = [topic.name for topic in topics.wanted(settings)]
    assert len(names) == len(set(names)) == 2 * 2 * 3 + 4
    parsed = [TopicNames("p").parse(name) for name in names]
    assert sum(route is not None for route in parsed) == 12


def test_request_topics_carry_the_brokers_clock_and_dead_letters_have_room() -> None:
    settings = contract_settings.build(
        {"topics": {"max_message_bytes": 20_000, "retention_hours": 1.5, "results_retention_hours": 2}}
    )
    by_name = {topic.name: topic for topic in topics.wanted(settings)}
    request = by_name["headrace.default.online.short"].properties
    assert request["message.timestamp.type"] == "LogAppendTime"
    assert (request["retention.ms"], request["max.message.bytes"]) == ("5400000", "20000")
    assert by_name["headrace.results"].properties["retention.ms"] == "7200000"
    assert int(by_name["headrace.dead"].properties["max.message.bytes"]) > 20_000
    assert by_name["headrace.control"].properties["cleanup.policy"] == "compact"
    assert by_name["headrace.control"].partitions == 1
    assert by_name["headrace.replies"].partitions == settings.topics.reply_partitions
