"""The client over both Kafka libraries and a real broker; answers come from a small responder."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker import records, topics
from broker.publisher import Publisher
from contract import identity, messages
from contract.errors import FatalError, HeadraceError, InvalidRequest, TransientError
from contract.messages import Request, Result
from contract.routing import Header
from contract.settings import Settings
from contract.statuses import Status
from headrace import Client
from headrace.stack.kafka import KafkaServer
from producers import backends
from producers.backends import Record
from producers.deliveries import DeliveryFailed
from producers.estimate import Estimator
from producers.prepare import Options, Preparer, Ticket
from tests.integration.kit import BACKENDS, Responder, build, text_of


@pytest.fixture(params=BACKENDS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def client_settings(kafka: str, topic_prefix: str, name: str) -> Settings:
    settings = build(kafka, topic_prefix, name)
    topics.ensure(settings)
    return settings


@pytest.fixture
def client(client_settings: Settings) -> Iterator[Client]:
    with Client(client_settings) as client:
        yield client


def on_topic(settings: Settings, topic: str) -> list[Record]:
    """Everything a topic holds."""
    reader, found = backends.open(settings).read_topic(topic, "earliest", None), []
    deadline = time.monotonic() + 30
    while not reader.at_end():
        assert time.monotonic() < deadline
        found += reader.poll(0.1)
    reader.close()
    return found


def short(settings: Settings) -> str:
    return settings.names.request("default", "online", "short")


# -- submit ------------------------------------------------------------------------------------------


def test_request_is_on_its_topic_when_submit_returns(client: Client, client_settings: Settings) -> None:
    ticket = client.submit(input="hello", max_tokens=5, deadline_s=60, traceparent="00-abc-def-01")
    (record,) = on_topic(client_settings, short(client_settings))
    assert record.topic == ticket.topic
    assert record.key == ticket.key.encode()
    request, error, _ = messages.parse_request(record.value)
    assert error is None
    assert (request.id, request.source, request.input) == (ticket.id, "default", "hello")
    assert ticket.key == identity.request_key("default", ticket.id)
    headers = dict(record.headers)
    assert headers[Header.KEY] == record.key
    assert headers[Header.TRACEPARENT] == b"00-abc-def-01"
    assert int(headers[Header.REPLY_TO] or b"") in range(3)
    assert abs(int(headers[Header.DEADLINE_MS] or b"") - record.timestamp_ms - 60_000) < 5_000


def test_class_and_bucket_choose_the_topic(client: Client, client_settings: Settings) -> None:
    ticket = client.submit(Request(input="x", max_tokens=5_000), class_name="offline", reply=False)
    assert ticket.topic == client_settings.names.request("default", "offline", "long")
    assert client.submit({"input": "x"}, bucket="long").topic.endswith(".online.long")


def test_invalid_request_raises_at_once_and_nothing_is_sent(client: Client, client_settings: Settings) -> None:
    for wrong in ({"max_tokens": 4.0, "input": "x"}, {}, {"input": "x", "prompt": "y"}):
        with pytest.raises(InvalidRequest):
            client.submit(wrong)
    with pytest.raises(InvalidRequest, match="not both"):
        client.submit({"input": "x"}, max_tokens=3)
    assert on_topic(client_settings, short(client_settings)) == []


@pytest.mark.parametrize("off", [-1, 0, 1])
def test_request_at_the_limit_is_taken_and_one_byte_more_is_refused_at_once(
    client: Client, client_settings: Settings, off: int
) -> None:
    limit = client_settings.topics.max_message_bytes
    preparer = Preparer(client_settings, Estimator(client_settings))
    fields = {"id": "b13", "input": "x" * (limit - 1_000)}
    trial = preparer.prepare(fields, Options(bucket="long"), 0, None)
    missing = limit + off - records.record_bytes(trial.key, trial.value, trial.headers)
    fields["input"] += "x" * missing
    begun = time.monotonic()
    if off <= 0:
        client.submit(fields, bucket="long", reply=False)
        (record,) = on_topic(client_settings, client_settings.names.request("default", "online", "long"))
        assert records.record_bytes(record.key, record.value, record.headers) == limit + off
    else:
        with pytest.raises(InvalidRequest, match=f"{limit + 1} bytes") as caught:
            client.submit(fields, bucket="long", reply=False)
        assert caught.value.code == "too_large"
    assert time.monotonic() - begun < 15


def test_equal_affinities_meet_in_few_partitions(client: Client, client_settings: Settings) -> None:
    for _ in range(30):
        client.submit(input="x", max_tokens=1, affinity="one tenant", reply=False)
    found = on_topic(client_settings, short(client_settings))
    assert len(found) == 30
    assert len({record.key for record in found}) <= client_settings.client.affinity_spread
    assert len({record.partition for record in found}) <= client_settings.client.affinity_spread


def test_missing_topics_are_named_with_the_command_that_makes_them(kafka: str, topic_prefix: str, name: str) -> None:
    with Client(build(kafka, topic_prefix, name)) as client:
        for reply in (True, False):
            with pytest.raises(FatalError, match=rf"{topic_prefix}\..*headrace topics create"):
                client.submit(input="x", reply=reply)
    topics.ensure(build(kafka, topic_prefix, name))
    with Client(build(kafka, topic_prefix, name)) as client:
        client.submit(input="x")


def test_topic_made_after_the_client_opened_is_found(client: Client, client_settings: Settings, kafka: str) -> None:
    client.submit(input="x")
    more = build(kafka, client_settings.topics.prefix, client_settings.client.backend, pools={"default": {}, "new": {}})
    with Client(more) as other:
        other.submit(input="x")
        topics.ensure(more)
        assert other.submit(input="x", pool="new", bucket="short").topic.endswith(".new.online.short")


def test_submit_after_close_is_an_error_and_close_twice_is_harmless(client: Client) -> None:
    client.submit(input="x")
    client.close()
    client.close()
    with pytest.raises(FatalError, match="closed"):
        client.submit(input="x")


def test_broker_that_is_not_there_is_one_clear_error_in_time() -> None:
    with Client(build("127.0.0.1:9", "p", "confluent", kafka={"request_timeout_s": 1.5})) as client:
        begun = time.monotonic()
        with pytest.raises(TransientError, match=r"127\.0\.0\.1:9 within 1\.5 s"):
            client.submit(input="x")
        assert time.monotonic() - begun < 5


# -- submit_many -------------------------------------------------------------------------------------


def test_stream_comes_back_in_order_each_delivered_once(client: Client, client_settings: Settings) -> None:
    requests = ({"id": str(n), "input": "x", "max_tokens": 1} for n in range(3_000))
    tickets = list(client.submit_many(requests))
    assert [ticket.id for ticket in tickets] == [str(n) for n in range(3_000)]
    found = [messages.parse_request(record.value).request.id for record in on_topic(client_settings, tickets[0].topic)]
    assert sorted(found, key=lambda id: int(id or "")) == [str(n) for n in range(3_000)]


def test_input_is_pulled_only_as_fast_as_it_is_acknowledged(client: Client, client_settings: Settings) -> None:
    pulled, most = 0, client_settings.client.max_unacknowledged

    def requests() -> Iterator[dict[str, Any]]:
        nonlocal pulled
        while True:  # endless: only a bounded stream ever gives a ticket
            pulled += 1
            yield {"input": "x", "max_tokens": 1}

    stream = client.submit_many(requests())
    for taken in range(1, 3 * most):
        next(stream)
        assert pulled - taken <= most
    stream.close()


def test_first_bad_item_raises_with_its_place_and_those_before_it_are_delivered(
    client: Client, client_settings: Settings
) -> None:
    requests = [{"input": "x", "max_tokens": 1}] * 7 + [{"input": "x", "n": 0}] + [{"input": "x", "max_tokens": 1}] * 3
    stream = client.submit_many(requests)
    taken = [next(stream) for _ in range(7)]
    with pytest.raises(InvalidRequest, match=r"item 7: n: ") as caught:
        next(stream)
    assert caught.value.param == "n"
    found = {record.key for record in on_topic(client_settings, short(client_settings))}
    assert found >= {ticket.key.encode() for ticket in taken}


def test_bad_items_are_told_by_place_and_the_others_go_on(client: Client, client_settings: Settings) -> None:
    requests: list[dict[str, Any]] = [{"id": str(n), "input": "x", "max_tokens": 1} for n in range(20)]
    requests[3] = {"input": 5}
    requests[11] = {"id": "11", "input": "x" * 200_000}
    told: list[tuple[int, HeadraceError]] = []
    tickets = list(client.submit_many(requests, on_error=lambda index, error: told.append((index, error))))
    assert [ticket.id for ticket in tickets] == [str(n) for n in range(20) if n not in (3, 11)]
    assert [index for index, _ in told] == [3, 11]
    assert getattr(told[1][1], "code", None) == "too_large"


def test_submits_from_many_threads_each_get_their_own_result(client: Client, client_settings: Settings) -> None:
    wrong: list[str] = []

    def work(thread: int) -> None:
        for number in range(20):
            text = f"{thread}-{number}"
            result = client.result(client.submit(input=text), timeout_s=60)
            if text_of(result) != text[::-1]:
                wrong.append(text)

    with Responder(client_settings):
        threads = [threading.Thread(target=work, args=[thread]) for thread in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
    assert wrong == []


# -- result ------------------------------------------------------------------------------------------


def test_result_comes_by_reply_partition_and_is_taken_once(client: Client, client_settings: Settings) -> None:
    with Responder(client_settings):
        ticket = client.submit(input="abc")
        result = client.result(ticket, timeout_s=30)
    assert (result.id, result.key, text_of(result)) == (ticket.id, ticket.key, "cba")
    with pytest.raises(TransientError, match="taken already") as caught:
        client.result(ticket, timeout_s=1)
    assert caught.value.code == "reply_not_awaited"


def test_result_may_be_asked_for_by_id(client: Client, client_settings: Settings) -> None:
    with Responder(client_settings):
        client.submit(id="mine", input="abc")
        assert client.result("mine", timeout_s=30).id == "mine"
    with pytest.raises(TransientError):
        client.result("never sent", timeout_s=1)


def test_late_result_is_a_timeout_that_tells_what_is_known_and_can_be_asked_for_again(
    client: Client, client_settings: Settings
) -> None:
    ticket = client.submit(input="abc")
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match=rf"{ticket.id} within 0\.3 s; sent to {ticket.topic}.*replies read"):
        client.result(ticket, timeout_s=0.3)
    assert time.monotonic() - begun < 2
    with Responder(client_settings):
        assert text_of(client.result(ticket, timeout_s=30)) == "cba"


def test_request_without_reply_carries_no_partition_and_is_not_awaited(
    client: Client, client_settings: Settings
) -> None:
    ticket = client.submit(input="abc", reply=False)
    (record,) = on_topic(client_settings, ticket.topic)
    assert Header.REPLY_TO not in dict(record.headers)
    with pytest.raises(TransientError, match="reply=False"):
        client.result(ticket, timeout_s=1)


def test_clients_that_share_a_partition_get_their_own_results(kafka: str, topic_prefix: str, name: str) -> None:
    settings = build(kafka, topic_prefix, name, topics={"reply_partitions": 1})
    topics.ensure(settings)
    with Responder(settings), Client(settings) as one, Client(settings) as other:
        pairs = [(client, client.submit(input=f"{n}"), f"{n}") for n, client in enumerate([one, other] * 10)]
        for client, ticket, text in reversed(pairs):
            assert text_of(client.result(ticket, timeout_s=30)) == text[::-1]
        with pytest.raises(TransientError):
            other.result(one.submit(input="x"), timeout_s=1)


def test_close_tells_those_who_wait(client: Client) -> None:
    ticket, told = client.submit(input="x"), []

    def wait() -> None:
        try:
            client.result(ticket, timeout_s=60)
        except TransientError as error:
            told.append(error.code)

    thread = threading.Thread(target=wait)
    thread.start()
    client.close()
    thread.join(30)
    assert told == ["client_closed"] or told == ["reply_not_awaited"]


def test_estimates_follow_what_results_report(client: Client, client_settings: Settings) -> None:
    with Responder(client_settings):  # counts two bytes a token
        for _ in range(15):
            client.result(client.submit(input="x" * 2_000), timeout_s=30)
    assert 2.0 <= client._core.estimator.bytes_per_token("default") < 2.5


# -- results -----------------------------------------------------------------------------------------


def publish_results(settings: Settings, ids: list[str]) -> None:
    publisher = Publisher(settings)
    publisher.start()
    for id in ids:
        key = identity.request_key("s", id)
        value = messages.encode(Result(key=key, id=id, source="s", status=Status.OK))
        publisher.publish(settings.names.results, b"one partition", value, [(Header.KEY, key.encode())])
    assert publisher.close(20) == 0
    assert publisher.poll()[1] == []


def test_results_from_the_beginning_end_where_the_topic_ends(client: Client, client_settings: Settings) -> None:
    assert list(client.results(since="earliest", follow=False)) == []
    publish_results(client_settings, [str(n) for n in range(700)])
    assert [result.id for result in client.results(since="earliest", follow=False)] == [str(n) for n in range(700)]
    assert list(client.results(since="latest", follow=False)) == []


def test_latest_results_begin_at_the_call_not_at_the_first_step(client: Client, client_settings: Settings) -> None:
    publish_results(client_settings, ["before"])
    stream = client.results()
    publish_results(client_settings, ["after"])
    assert next(stream).id == "after"
    stream.close()


def test_group_repeats_the_result_that_was_not_dealt_with(
    client: Client, client_settings: Settings, topic_prefix: str
) -> None:
    publish_results(client_settings, [str(n) for n in range(6)])
    stream = client.results(since="earliest", group=f"{topic_prefix}-group")
    assert [next(stream).id for _ in range(3)] == ["0", "1", "2"]
    stream.close()  # as a crash would: "2" was handed out, the next one was not asked for
    rest = client.results(since="earliest", group=f"{topic_prefix}-group", follow=False)
    assert [result.id for result in rest] == ["2", "3", "4", "5"]
    assert list(client.results(since="earliest", group=f"{topic_prefix}-group", follow=False)) == []


def test_garbage_on_the_results_topic_ends_no_stream(client: Client, client_settings: Settings) -> None:
    publisher = Publisher(client_settings)
    publisher.start()
    for value in (b"{", b"[]", b"", b'{"key":1}'):
        publisher.publish(client_settings.names.results, b"one partition", value, [])
    assert publisher.close(20) == 0
    publish_results(client_settings, ["good"])
    assert [result.id for result in client.results(since="earliest", follow=False)] == ["good"]


# -- a broker that goes away -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_broker(session_folder: Path) -> Iterator[KafkaServer]:
    server = KafkaServer(session_folder / "client-broker")
    server.start()
    yield server
    server.stop()


def test_stream_outlives_a_broker_that_comes_back_and_holds_still_meanwhile(own_broker: KafkaServer) -> None:
    settings = build(own_broker.bootstrap_servers, "back", "confluent")
    topics.ensure(settings)
    most = settings.client.max_unacknowledged
    client, tickets, ahead = Client(settings), list[Ticket](), list[int]()
    gone = threading.Event()

    def requests() -> Iterator[dict[str, Any]]:
        for number in range(4 * most):
            if number == most // 2:
                own_broker.kill()
                gone.set()
            ahead.append(number + 1 - len(tickets))
            yield {"id": str(number), "input": "x", "max_tokens": 1}

    def come_back() -> None:
        assert gone.wait(60)
        deadline = time.monotonic() + 60
        while client._core._gate.taken < most and time.monotonic() < deadline:  # the stream runs on to its bound
            time.sleep(0.01)
        own_broker.start()

    helper = threading.Thread(target=come_back)
    helper.start()
    for ticket in client.submit_many(requests()):
        tickets.append(ticket)
    helper.join(60)
    client.close()
    assert [ticket.id for ticket in tickets] == [str(n) for n in range(4 * most)]
    assert max(ahead) <= most
    found = [messages.parse_request(record.value).request.id for record in on_topic(settings, tickets[0].topic)]
    assert len(found) == len(set(found)) == 4 * most


def test_request_that_is_not_delivered_in_time_is_named(own_broker: KafkaServer) -> None:
    settings = build(own_broker.bootstrap_servers, "late", "confluent", kafka={"delivery_timeout_s": 2})
    topics.ensure(settings)
    with Client(settings) as client:
        client.submit(id="warm", input="x")
        own_broker.stop()
        try:
            begun = time.monotonic()
            with pytest.raises(DeliveryFailed, match="request late-1 to late"):
                client.submit(id="late-1", input="x")
            with pytest.raises(DeliveryFailed, match="item 0: request late-2") as caught:
                list(client.submit_many([{"id": "late-2", "input": "x"}] * 3))
            assert (caught.value.id, caught.value.index) == ("late-2", 0)
            assert time.monotonic() - begun < 15
            with pytest.raises(TransientError, match="not awaited"):
                client.result("late-1", timeout_s=0)
        finally:
            own_broker.start()
