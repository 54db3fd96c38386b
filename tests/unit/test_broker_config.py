"""Client properties: what users may change, what they may not, and the same in kafka-python's words."""

from __future__ import annotations

from typing import Any

import confluent_kafka as ck
import kafka
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker import config, kafka_python
from contract import settings as contract_settings
from contract.errors import SettingsError
from contract.settings import Settings


def with_kafka(**kafka_section: Any) -> Settings:
    return contract_settings.build({"kafka": kafka_section})


def test_specific_property_wins_over_common_one_and_over_the_default() -> None:
    settings = with_kafka(
        properties={"client.id": "all", "linger.ms": 1}, producer={"client.id": "mine"}, consumer={"fetch.min.bytes": 7}
    )
    producer = config.producer_config(settings, **{"linger.ms": 99, "compression.type": "lz4"})
    assert (producer["client.id"], producer["linger.ms"], producer["compression.type"]) == ("mine", 1, "lz4")
    assert "fetch.min.bytes" not in producer
    consumer = config.consumer_config(settings, "g", **{"auto.offset.reset": "latest"})
    assert (consumer["client.id"], consumer["fetch.min.bytes"], consumer["auto.offset.reset"]) == ("all", 7, "latest")


def test_unquoted_toml_name_is_the_same_property() -> None:
    nested = with_kafka(properties={"ssl": {"ca": {"location": "/ca.pem"}}, "security": {"protocol": "ssl"}})
    for properties in (
        config.producer_config(nested),
        config.consumer_config(nested, "g"),
        config.admin_config(nested),
    ):
        assert (properties["ssl.ca.location"], properties["security.protocol"]) == ("/ca.pem", "ssl")


@pytest.mark.parametrize("table", ["properties", "producer"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("acks", 1),
        ("acks", "0"),
        ("request.required.acks", 1),
        ("enable.idempotence", False),
        ("partitioner", "random"),
    ],
)
@pytest.mark.parametrize("make", [config.producer_config, kafka_python.producer_config])
def test_property_that_weakens_a_producer_is_refused_by_name(make: Any, table: str, name: str, value: object) -> None:
    with pytest.raises(SettingsError, match=rf"kafka\.{table}\.{name} = "):
        make(with_kafka(**{table: {name: value}}))


def test_property_that_only_repeats_the_promise_is_taken() -> None:
    settings = with_kafka(producer={"acks": -1, "enable.idempotence": "true", "partitioner": "murmur2_random"})
    assert config.producer_config(settings)["acks"] == -1
    assert kafka_python.producer_config(settings)["acks"] == "all"


@pytest.mark.parametrize("name", ["enable.auto.commit", "enable.auto.offset.store"])
def test_consumer_cannot_be_made_to_commit_by_itself(name: str) -> None:
    with pytest.raises(SettingsError, match=name):
        config.consumer_config(with_kafka(consumer={name: True}), "g")


def test_newer_group_protocol_leaves_session_and_assignor_to_the_broker() -> None:
    consumer = config.consumer_config(with_kafka(group_protocol="consumer"), "g")
    assert consumer["group.protocol"] == "consumer"
    assert not {"session.timeout.ms", "partition.assignment.strategy", "heartbeat.interval.ms"} & set(consumer)
    ck.Consumer(consumer).close()  # librdkafka takes the combination


def test_largest_records_fit_what_clients_accept() -> None:
    settings = contract_settings.build({"topics": {"max_message_bytes": 1_000_000_000}})
    config.connect(ck.Producer, config.producer_config(settings))
    config.connect(ck.Consumer, config.consumer_config(settings, "g")).close()


def test_batch_never_exceeds_the_topic_limit() -> None:
    settings = contract_settings.build({"topics": {"max_message_bytes": 20_000}})
    assert config.producer_config(settings)["batch.size"] == 20_000
    assert kafka_python.producer_config(settings)["batch_size"] == 20_000


@pytest.mark.parametrize(
    ("properties", "name"),
    [
        ({"no.such.property": 1}, "no.such.property"),
        ({"retry.backoff.ms": "soon"}, "retry.backoff.ms"),
        ({"ssl.key.pem": "SECRET-KEY", "security.protocol": "ssl"}, "ssl.key.pem"),
    ],
)
def test_property_that_librdkafka_refuses_is_named_and_no_secret_shown(properties: dict[str, Any], name: str) -> None:
    with pytest.raises(SettingsError) as caught:
        config.connect(ck.Producer, config.producer_config(with_kafka(properties=properties)))
    assert caught.value.field == f"kafka.{name}"
    assert "SECRET" not in str(caught.value)


def test_client_log_shows_one_line_of_a_kind_and_never_raises() -> None:
    log = config.ClientLog()
    shown: list[dict[str, Any]] = []

    class Recorder:
        def log(self, level: int, event: str, **fields: Any) -> None:
            shown.append(fields)
            raise OSError("the stream is closed")

    log._log = Recorder()
    for _ in range(5):
        log.log(40, "%s", "FAIL", "client", "connection refused")
    log.log(40, "%s", "RESOLVE", "client", "no such host")
    assert [fields["facility"] for fields in shown] == ["FAIL", "RESOLVE"]


# -- kafka-python ------------------------------------------------------------------------------------


def test_every_translated_name_is_an_argument_of_kafka_python() -> None:
    for table, kind in ((kafka_python._PRODUCER, kafka.KafkaProducer), (kafka_python._CONSUMER, kafka.KafkaConsumer)):
        for name, _ in (table | kafka_python._ANY).values():
            assert name in kind.DEFAULT_CONFIG, name
    settings = with_kafka()
    assert set(kafka_python.producer_config(settings)) <= set(kafka.KafkaProducer.DEFAULT_CONFIG)
    assert set(kafka_python.consumer_config(settings, "g")) <= set(kafka.KafkaConsumer.DEFAULT_CONFIG)


def test_security_is_translated() -> None:
    settings = with_kafka(
        properties={
            "security.protocol": "sasl_ssl",
            "sasl.mechanisms": "scram-sha-512",
            "sasl.username": "u",
            "sasl.password": "p",
            "ssl.ca.location": "/ca.pem",
            "ssl.endpoint.identification.algorithm": "none",
        }
    )
    for properties in (kafka_python.producer_config(settings), kafka_python.consumer_config(settings, None)):
        assert properties["security_protocol"] == "SASL_SSL"
        assert properties["sasl_mechanism"] == "SCRAM-SHA-512"
        assert (properties["sasl_plain_username"], properties["sasl_plain_password"]) == ("u", "p")
        assert properties["ssl_cafile"] == "/ca.pem"
        assert properties["ssl_check_hostname"] is False


def test_text_from_the_environment_becomes_numbers() -> None:
    settings = with_kafka(producer={"linger.ms": "20"}, consumer={"fetch.min.bytes": "3", "check.crcs": "false"})
    assert kafka_python.producer_config(settings)["linger_ms"] == 20
    consumer = kafka_python.consumer_config(settings, None)
    assert (consumer["fetch_min_bytes"], consumer["check_crcs"]) == (3, False)


@pytest.mark.parametrize("table", ["properties", "producer"])
def test_property_kafka_python_lacks_is_named_not_dropped(table: str) -> None:
    with pytest.raises(SettingsError, match=rf"kafka\.{table}\.sasl\.oauthbearer\.config = '\(hidden\)'.*confluent"):
        kafka_python.producer_config(with_kafka(**{table: {"sasl.oauthbearer.config": "scope=secret"}}))


def test_common_property_of_the_other_kind_is_left_out_as_librdkafka_does() -> None:
    settings = with_kafka(properties={"linger.ms": 3, "fetch.min.bytes": 5})
    assert "fetch_min_bytes" not in kafka_python.producer_config(settings)
    assert "linger_ms" not in kafka_python.consumer_config(settings, None)
    with pytest.raises(SettingsError, match=r"kafka\.consumer\.linger\.ms"):
        kafka_python.consumer_config(with_kafka(consumer={"linger.ms": 3}), None)


@given(st.sampled_from(sorted(kafka_python._ANY)), st.text(max_size=5))
def test_translation_gives_a_value_or_names_the_property(name: str, value: str) -> None:
    settings = with_kafka(properties={name: value})
    try:
        kafka_python.consumer_config(settings, None)
    except SettingsError as error:
        named = error.field
    else:
        return
    assert named == f"kafka.properties.{name}"
