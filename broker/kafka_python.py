"""Client properties for kafka-python, translated from librdkafka's names. Pure.

Settings name properties once, under librdkafka's names; one that kafka-python cannot express is a
``SettingsError`` that names it, never silently dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from broker import config
from contract.errors import SettingsError
from contract.settings import Settings

Properties = dict[str, Any]
Translation = tuple[str, Callable[[Any], Any]]

_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")


def _flag(value: Any) -> bool:
    text = str(value).lower()
    if text not in ("true", "1", "on", "yes", "false", "0", "off", "no"):
        raise ValueError("must be true or false")
    return text in ("true", "1", "on", "yes")


def _upper(value: Any) -> str:
    return str(value).upper()


def _protocol(value: Any) -> str:
    if _upper(value) not in _PROTOCOLS:  # kafka-python itself would connect in plain text
        raise ValueError(f"must be one of {', '.join(_PROTOCOLS)}")
    return _upper(value)


def _algorithm(value: Any) -> bool:
    if str(value) not in ("https", "none", ""):
        raise ValueError("must be https or none")
    return str(value) == "https"


def _compression(value: Any) -> str | None:
    return None if str(value) == "none" else str(value)


_ANY: dict[str, Translation] = {
    "client.id": ("client_id", str),
    "security.protocol": ("security_protocol", _protocol),
    "sasl.mechanism": ("sasl_mechanism", _upper),
    "sasl.mechanisms": ("sasl_mechanism", _upper),
    "sasl.username": ("sasl_plain_username", str),
    "sasl.password": ("sasl_plain_password", str),
    "sasl.kerberos.service.name": ("sasl_kerberos_service_name", str),
    "ssl.ca.location": ("ssl_cafile", str),
    "ssl.certificate.location": ("ssl_certfile", str),
    "ssl.key.location": ("ssl_keyfile", str),
    "ssl.key.password": ("ssl_password", str),
    "ssl.crl.location": ("ssl_crlfile", str),
    "ssl.cipher.suites": ("ssl_ciphers", str),
    "ssl.endpoint.identification.algorithm": ("ssl_check_hostname", _algorithm),
    "reconnect.backoff.ms": ("reconnect_backoff_ms", int),
    "reconnect.backoff.max.ms": ("reconnect_backoff_max_ms", int),
    "retry.backoff.ms": ("retry_backoff_ms", int),
    "metadata.max.age.ms": ("metadata_max_age_ms", int),
    "connections.max.idle.ms": ("connections_max_idle_ms", int),
    "socket.send.buffer.bytes": ("send_buffer_bytes", int),
    "socket.receive.buffer.bytes": ("receive_buffer_bytes", int),
    "receive.message.max.bytes": ("receive_message_max_bytes", int),
    "client.dns.lookup": ("client_dns_lookup", str),
}
_PRODUCER: dict[str, Translation] = {
    "compression.type": ("compression_type", _compression),
    "compression.codec": ("compression_type", _compression),
    "linger.ms": ("linger_ms", int),
    "queue.buffering.max.ms": ("linger_ms", int),
    "batch.size": ("batch_size", int),
    "request.timeout.ms": ("request_timeout_ms", int),
    "delivery.timeout.ms": ("delivery_timeout_ms", int),
    "message.timeout.ms": ("delivery_timeout_ms", int),
    "max.in.flight": ("max_in_flight_requests_per_connection", int),
    "max.in.flight.requests.per.connection": ("max_in_flight_requests_per_connection", int),
    "retries": ("retries", int),
    "message.send.max.retries": ("retries", int),
}
_CONSUMER: dict[str, Translation] = {
    "fetch.min.bytes": ("fetch_min_bytes", int),
    "fetch.wait.max.ms": ("fetch_max_wait_ms", int),
    "fetch.max.bytes": ("fetch_max_bytes", int),
    "max.partition.fetch.bytes": ("max_partition_fetch_bytes", int),
    "fetch.message.max.bytes": ("max_partition_fetch_bytes", int),
    "isolation.level": ("isolation_level", str),
    "session.timeout.ms": ("session_timeout_ms", int),
    "heartbeat.interval.ms": ("heartbeat_interval_ms", int),
    "max.poll.interval.ms": ("max_poll_interval_ms", int),
    "group.instance.id": ("group_instance_id", str),
    "client.rack": ("client_rack", str),
    "check.crcs": ("check_crcs", _flag),
}
_BATCH_BYTES = 65_536
_REQUEST_TIMEOUT_MS = 30_000


def producer_config(settings: Settings) -> Properties:
    """Arguments of an idempotent ``KafkaProducer`` with acks from all in-sync copies."""
    topics = settings.topics
    linger_ms = settings.client.linger_ms
    delivery_ms = max(int(settings.kafka.delivery_timeout_s * 1_000), linger_ms + 1_000)
    ours = {
        "acks": "all",
        "enable_idempotence": True,
        "linger_ms": linger_ms,
        "batch_size": min(_BATCH_BYTES, topics.max_message_bytes),
        # It counts its own framing into a record's size; what is too large is judged before, exactly.
        "max_request_size": 2 * config.dead_message_bytes(settings),
        "delivery_timeout_ms": delivery_ms,
        "request_timeout_ms": min(_REQUEST_TIMEOUT_MS, delivery_ms - linger_ms),
        "max_block_ms": int(settings.kafka.request_timeout_s * 1_000),
    }
    return _common(settings) | ours | _passed(settings, "producer", _PRODUCER, config.PRODUCER_PROMISES)


def consumer_config(settings: Settings, group_id: str | None) -> Properties:
    """Arguments of a ``KafkaConsumer`` that commits by hand; ``group_id`` None: no group, partitions assigned."""
    largest = config.dead_message_bytes(settings)
    ours = {
        "group_id": group_id,
        "enable_auto_commit": False,
        "isolation_level": "read_committed",  # librdkafka's default, and so the same on both
        "session_timeout_ms": settings.kafka.session_timeout_ms,
        "heartbeat_interval_ms": min(3_000, settings.kafka.session_timeout_ms // 3),
        "max_partition_fetch_bytes": max(1_048_576, largest),
        "fetch_max_bytes": max(52_428_800, largest),
        "receive_message_max_bytes": max(100_000_000, 2 * largest),
    }
    return _common(settings) | ours | _passed(settings, "consumer", _CONSUMER, config.CONSUMER_PROMISES)


def _common(settings: Settings) -> Properties:
    return {
        "bootstrap_servers": settings.kafka.bootstrap_servers.split(","),
        "client_id": "headrace",
        "reconnect_backoff_max_ms": 2_000,
        "allow_auto_create_topics": False,
        "bootstrap_timeout_ms": int(settings.kafka.request_timeout_s * 1_000),
        "metrics_enabled": False,
    }


def _passed(
    settings: Settings,
    kind: str,
    table: Mapping[str, Translation],
    promises: Mapping[str, tuple[tuple[str, ...], str]],
) -> Properties:
    """The user's properties, translated. In ``kafka.properties`` those of the other kind are left out."""
    of_the_other_kind = set(_PRODUCER) | set(_CONSUMER)
    own = settings.kafka.producer if kind == "producer" else settings.kafka.consumer
    own_names = set(config.flat(own))
    found: Properties = {}
    for name, value in config.passed(settings, kind, promises).items():
        translation = _ANY.get(name) or table.get(name)
        if name in promises or (translation is None and name in of_the_other_kind and name not in own_names):
            continue
        field = f"kafka.{kind if name in own_names else 'properties'}.{name}"
        if translation is None:
            raise SettingsError(
                field, config.shown(name, value), 'kafka-python has no such property: use client.backend = "confluent"'
            )
        try:
            found[translation[0]] = translation[1](value)
        except ValueError as error:
            raise SettingsError(field, config.shown(name, value), str(error)) from None
    return found
