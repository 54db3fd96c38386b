"""One conformance suite over both Kafka client libraries, against a real broker."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker import records, topics
from broker.publisher import Failure, FailureKind
from contract.errors import FatalError, SettingsError, TransientError
from contract.settings import Settings
from headrace.stack.kafka import KafkaServer
from producers import backends
from producers.backends import Backend, Producer, Reader, Record
from tests.integration.kit import BACKENDS, build

KEYS = (
    [f"key-{n}".encode() for n in range(400)]
    + [f"schlüssel-{n}-日本語-🚀".encode() for n in range(300)]
    + [bytes([n % 256, n // 256, 0xFF, 0x00]) for n in range(299)]
    + [b""]
)


@pytest.fixture(params=BACKENDS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def broker_settings(kafka: str, topic_prefix: str, name: str) -> Settings:
    settings = build(kafka, topic_prefix, name)
    topics.ensure(settings)
    return settings


@pytest.fixture
def backend(broker_settings: Settings) -> Backend:
    return backends.open(broker_settings)


@pytest.fixture
def producer(backend: Backend) -> Iterator[Producer]:
    producer = backend.producer()
    yield producer
    producer.close(10)


class Reports:
    """Delivery reports by token; a second report for one token is an error."""

    def __init__(self) -> None:
        self.ends: dict[object, Failure | None] = {}
        self.twice: list[object] = []

    def of(self, token: object) -> backends.Done:
        def done(failure: Failure | None) -> None:
            if token in self.ends:
                self.twice.append(token)
            self.ends[token] = failure

        return done

    def wait(self, count: int, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while len(self.ends) < count:
            assert time.monotonic() < deadline, f"{len(self.ends)} of {count}"
            time.sleep(0.01)
        assert self.twice == []

    @property
    def failures(self) -> dict[object, Failure]:
        return {token: failure for token, failure in self.ends.items() if failure is not None}


def read(reader: Reader, count: int, timeout_s: float = 30) -> list[Record]:
    found: list[Record] = []
    deadline = time.monotonic() + timeout_s
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count}"
        found += reader.poll(0.1)
    return found


def send(
    producer: Producer, topic: str, values: list[bytes], key: bytes | None = b"k", partition: int | None = None
) -> None:
    reports = Reports()
    for index, value in enumerate(values):
        producer.produce(topic, key, value, [], reports.of(index), partition)
    reports.wait(len(values))
    assert reports.failures == {}


# -- producing ---------------------------------------------------------------------------------------


def partitions_by_key(settings: Settings, topic: str, keys: list[bytes]) -> dict[bytes, int]:
    backend = backends.open(settings)
    producer, reports = backend.producer(), Reports()
    for key in keys:
        producer.produce(topic, key, b"v", [], reports.of(key))
    reports.wait(len(keys))
    producer.close(10)
    reader = backend.read_topic(topic, "earliest", None)
    found = {record.key or b"": record.partition for record in read(reader, len(keys))}
    reader.close()
    return found


def test_equal_keys_take_equal_partitions_in_both_libraries(kafka: str, topic_prefix: str) -> None:
    chosen = []
    for name in BACKENDS:
        settings = build(kafka, f"{topic_prefix}.{name}", name, topics={"partitions": 7})
        topics.ensure(settings)
        chosen.append(partitions_by_key(settings, settings.names.results, KEYS))
    assert len(chosen[0]) == len(set(KEYS)) == 1_000
    assert chosen[0] == chosen[1]
    assert len(set(chosen[0].values())) == 7


def test_partition_is_the_one_kafkas_own_client_takes(broker_settings: Settings) -> None:
    # Hashes from Kafka's own test of its murmur2 (UtilsTest).
    hashes = {
        b"21": -973932308,
        b"foobar": -790332482,
        b"a-little-bit-long-string": -985981536,
        b"a-little-bit-longer-string": -1486304829,
        b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
        b"abc": 479470107,
    }
    found = partitions_by_key(broker_settings, broker_settings.names.results, list(hashes))
    assert found == {key: (hash_ & 0x7FFF_FFFF) % 3 for key, hash_ in hashes.items()}


def test_record_without_key_is_delivered_somewhere(
    broker_settings: Settings, backend: Backend, producer: Producer
) -> None:
    send(producer, broker_settings.names.results, [b"v"] * 20, key=None)
    reader = backend.read_topic(broker_settings.names.results, "earliest", None)
    assert {record.key for record in read(reader, 20)} == {None}
    reader.close()


def test_every_record_is_reported_once_and_keeps_its_place(
    broker_settings: Settings, backend: Backend, producer: Producer
) -> None:
    topic = broker_settings.names.results
    send(producer, topic, [str(n).encode() for n in range(3_000)])
    reader = backend.read_topic(topic, "earliest", None)
    found = read(reader, 3_000)
    assert [int(record.value or b"") for record in found] == list(range(3_000))
    assert len({record.partition for record in found}) == 1
    assert [record.offset for record in found] == list(range(3_000))
    assert all(record.timestamp_ms > 1_700_000_000_000 for record in found)
    reader.close()


def test_producing_from_several_threads_loses_nothing(
    broker_settings: Settings, backend: Backend, producer: Producer
) -> None:
    reports = Reports()

    def produce(thread: int) -> None:
        for number in range(300):
            token = f"{thread}-{number}"
            producer.produce(broker_settings.names.results, token.encode(), token.encode(), [], reports.of(token))

    threads = [threading.Thread(target=produce, args=[thread]) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    reports.wait(1_200)
    assert reports.failures == {}
    reader = backend.read_topic(broker_settings.names.results, "earliest", None)
    assert {(record.value or b"").decode() for record in read(reader, 1_200)} == set(reports.ends)
    reader.close()


def test_headers_arrive_in_order_and_repeated_names_stay(
    broker_settings: Settings, backend: Backend, producer: Producer
) -> None:
    headers: backends.Headers = [("a", b"1"), ("ü", b"\xff\x00"), ("a", b"2"), ("empty", b"")]
    reports = Reports()
    producer.produce(broker_settings.names.results, b"k", b"v", headers, reports.of(0))
    reports.wait(1)
    reader = backend.read_topic(broker_settings.names.results, "earliest", None)
    (record,) = read(reader, 1)
    assert record.headers == headers
    reader.close()


@pytest.mark.parametrize("off", [-1, 0, 1])
def test_limit_of_the_topic_is_exact_to_the_byte(
    broker_settings: Settings, backend: Backend, producer: Producer, off: int
) -> None:
    limit = broker_settings.topics.max_message_bytes
    value = b"v" * (limit + off - (records.record_bytes(b"k", b"v" * limit, [("h", b"1")]) - limit))
    assert records.record_bytes(b"k", value, [("h", b"1")]) == limit + off
    topic, reports, begun = broker_settings.names.results, Reports(), time.monotonic()
    producer.produce(topic, b"k", b"before", [], reports.of("before"))
    producer.produce(topic, b"k", value, [("h", b"1")], reports.of("large"))
    producer.produce(topic, b"k", b"after", [], reports.of("after"))
    reports.wait(3)
    assert time.monotonic() - begun < 10
    assert {token: failure.kind for token, failure in reports.failures.items()} == (
        {} if off <= 0 else {"large": FailureKind.TOO_LARGE}
    )


def test_large_records_share_no_batch_that_the_topic_refuses(broker_settings: Settings, producer: Producer) -> None:
    send(producer, broker_settings.names.results, [b"v" * 33_000] * 100)


def test_partition_that_is_not_there_is_refused(broker_settings: Settings, producer: Producer) -> None:
    topic, reports = broker_settings.names.results, Reports()
    send(producer, topic, [b"warm"])
    producer.produce(topic, b"k", b"v", [], reports.of("gone"), 99)
    reports.wait(1)
    assert reports.failures["gone"].kind is FailureKind.REFUSED


def test_partition_counts_name_every_topic_and_make_none(broker_settings: Settings, producer: Producer) -> None:
    counts = producer.partition_counts(10)
    assert counts[broker_settings.names.results] == 3
    assert counts[broker_settings.names.control] == 1
    assert "never-made" not in counts
    assert "never-made" not in producer.partition_counts(10)


def test_close_delivers_first_and_twice_is_harmless(broker_settings: Settings, backend: Backend) -> None:
    producer, reports = backend.producer(), Reports()
    for number in range(100):
        producer.produce(broker_settings.names.results, b"k", b"v", [], reports.of(number))
    producer.close(20)
    assert len(reports.ends) == 100
    assert reports.failures == {}
    producer.close(20)


# -- reading -----------------------------------------------------------------------------------------


def test_partition_is_read_from_its_present_end(
    broker_settings: Settings, backend: Backend, producer: Producer
) -> None:
    topic = broker_settings.names.replies
    send(producer, topic, [b"old"], partition=1)
    reader = backend.read_partition(topic, 1)
    # Sent before the first poll: the position was fixed when the reader was made.
    send(producer, topic, [b"other partition"], partition=2)
    send(producer, topic, [b"new-1", b"new-2"], partition=1)
    assert [record.value for record in read(reader, 2)] == [b"new-1", b"new-2"]
    assert reader.poll(0.3) == []
    reader.close()
    reader.close()


def test_topic_is_read_from_where_since_says_as_of_the_call(
    broker_settings: Settings, backend: Backend, producer: Producer
) -> None:
    topic = broker_settings.names.results
    for partition in range(3):
        send(producer, topic, [b"old"], partition=partition)
    latest, earliest = backend.read_topic(topic, "latest", None), backend.read_topic(topic, "earliest", None)
    for partition in range(3):
        send(producer, topic, [b"new"], partition=partition)
    assert [record.value for record in read(latest, 3)] == [b"new"] * 3
    assert sorted(record.value or b"" for record in read(earliest, 6)) == [b"new"] * 3 + [b"old"] * 3
    latest.close()
    earliest.close()


@pytest.mark.parametrize("group", [None, "readers"])
def test_end_is_reached_and_only_then(
    broker_settings: Settings, backend: Backend, producer: Producer, group: str | None, topic_prefix: str
) -> None:
    topic = broker_settings.names.results
    send(producer, topic, [b"v"] * 1_200)
    reader = backend.read_topic(topic, "earliest", f"{topic_prefix}-{group}" if group else None)
    count, deadline = 0, time.monotonic() + 30
    while not reader.at_end():
        assert time.monotonic() < deadline
        count += len(reader.poll(0.1))
    assert count == 1_200
    reader.close()


def test_empty_topic_is_at_its_end(broker_settings: Settings, backend: Backend) -> None:
    reader = backend.read_topic(broker_settings.names.results, "earliest", None)
    deadline = time.monotonic() + 20
    while not reader.at_end():
        assert time.monotonic() < deadline
        assert reader.poll(0.1) == []
    reader.close()


def test_group_goes_on_after_what_is_done_and_repeats_what_is_not(
    broker_settings: Settings, backend: Backend, producer: Producer, topic_prefix: str
) -> None:
    topic, group = broker_settings.names.results, f"{topic_prefix}-group"
    send(producer, topic, [str(n).encode() for n in range(10)])
    first = backend.read_topic(topic, "earliest", group)
    found = read(first, 10)
    for record in found[:6]:
        first.done(record)
    first.close()
    second = backend.read_topic(topic, "earliest", group)
    assert [record.value for record in read(second, 4)] == [b"6", b"7", b"8", b"9"]
    second.close()


def test_members_of_a_group_share_the_topic(
    broker_settings: Settings, backend: Backend, producer: Producer, topic_prefix: str
) -> None:
    topic, group = broker_settings.names.results, f"{topic_prefix}-group"
    readers = [backend.read_topic(topic, "earliest", group) for _ in range(2)]
    for partition in range(3):
        send(producer, topic, [f"{partition}-{n}".encode() for n in range(50)], partition=partition)
    values: list[set[bytes]] = [set(), set()]
    number, deadline = 0, time.monotonic() + 60
    while not (values[0] and values[1]) or len(values[0] | values[1]) < 150 + number:
        assert time.monotonic() < deadline, [len(v) for v in values]
        send(producer, topic, [f"more-{number}".encode()], partition=number % 3)
        number += 1
        for index, reader in enumerate(readers):
            for record in reader.poll(0.1):
                values[index].add(record.value or b"")
                reader.done(record)
    for reader in readers:
        reader.close()


@pytest.mark.parametrize("group", [None, "group"])
def test_topic_that_is_not_there_is_named(broker_settings: Settings, backend: Backend, group: str | None) -> None:
    with pytest.raises(FatalError, match="no-such-topic"):
        backend.read_topic("no-such-topic", "latest", group)


# -- trouble -----------------------------------------------------------------------------------------


@pytest.fixture
def leaky_connects(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """kafka-python leaves the sockets of refused connections to the garbage collector: collect them here.

    Log records hold the errors, these their frames, and these the sockets.
    """
    yield
    caplog.get_records("call").clear()
    gc.collect()


trouble = [
    pytest.mark.usefixtures("leaky_connects"),
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]


def marked(test: Callable[..., None]) -> Callable[..., None]:
    for mark in trouble:
        test = mark(test)
    return test


def unreachable(name: str) -> Backend:
    return backends.open(build("127.0.0.1:9", "p", name, kafka={"request_timeout_s": 1.5, "delivery_timeout_s": 2}))


@marked
def test_broker_that_is_not_there_is_one_clear_error_in_time(name: str) -> None:
    backend = unreachable(name)
    begun = time.monotonic()
    with pytest.raises(TransientError, match=r"127\.0\.0\.1:9 within 1\.5 s") as caught:
        backend.producer().partition_counts(1.5)
    assert caught.value.code == "broker_unreachable"
    assert time.monotonic() - begun < 6
    for group in (None, "g"):
        begun = time.monotonic()
        with pytest.raises(TransientError, match=r"127\.0\.0\.1:9"):
            backend.read_topic("t", "latest", group)
        assert time.monotonic() - begun < 6


def test_property_the_library_refuses_is_a_settings_error(kafka: str, name: str) -> None:
    settings = build(kafka, "p", name, kafka={"properties": {"security.protocol": "carrier-pigeon"}})
    with pytest.raises(SettingsError, match="security"):
        backends.open(settings).producer()


@pytest.fixture(scope="module")
def own_broker(session_folder: Path) -> Iterator[KafkaServer]:
    server = KafkaServer(session_folder / "own-broker")
    server.start()
    yield server
    server.stop()


@marked
@pytest.mark.parametrize("how", ["stop", "kill"])
def test_broker_that_went_and_came_back_has_every_record_once_in_order(
    own_broker: KafkaServer, name: str, how: str
) -> None:
    settings = build(own_broker.bootstrap_servers, f"{name}-{how}", name)
    topics.ensure(settings)
    topic, backend, reports = settings.names.results, backends.open(settings), Reports()
    producer = backend.producer()
    reader = backend.read_topic(topic, "earliest", None)
    for number in range(300):
        producer.produce(topic, b"k", str(number).encode(), [], reports.of(number))
        if number == 100:
            (own_broker.kill if how == "kill" else own_broker.stop)()
    own_broker.start()
    reports.wait(300)
    assert reports.failures == {}
    found = read(reader, 300, 60)
    assert [int(record.value or b"") for record in found] == list(range(300))
    reader.close()
    producer.close(10)


@marked
def test_broker_that_stays_away_fails_the_record_at_the_delivery_deadline(own_broker: KafkaServer, name: str) -> None:
    settings = build(own_broker.bootstrap_servers, f"{name}-away", name, kafka={"delivery_timeout_s": 3})
    topics.ensure(settings)
    topic, reports = settings.names.results, Reports()
    producer = backends.open(settings).producer()
    producer.produce(topic, b"k", b"v", [], reports.of("warm"))
    reports.wait(1)
    own_broker.stop()
    try:
        begun = time.monotonic()
        producer.produce(topic, b"k", b"v", [], reports.of("late"))
        reports.wait(2, 20)
        assert 2 < time.monotonic() - begun < 15
        assert reports.failures["late"].kind is FailureKind.RETRIABLE
        producer.produce(topic, b"k", b"v", [], reports.of("given up"))
        producer.close(0.2)
        reports.wait(3, 20)
        assert "given up" in reports.failures
    finally:
        own_broker.start()
