"""``headrace dead list|show|replay`` against a real broker."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import confluent_kafka as ck
import orjson
import pytest
from click.testing import CliRunner, Result
from confluent_kafka import admin

from broker import config, topics
from broker.publisher import Publisher
from broker.reader import Reader
from broker.records import Record
from consumers.dead_letters import dead_letter
from consumers.item import Desk, Headers, Item, Lease
from contract import identity
from contract import settings as contract_settings
from contract.routing import Header
from contract.settings import Settings
from contract.statuses import Status
from headrace import cli
from tests.integration.kit import build

ROOM = 90_000


@pytest.fixture
def one(kafka: str, topic_prefix: str) -> Settings:
    settings = build(kafka, topic_prefix, "confluent")
    topics.ensure(settings)
    return settings


def run(settings: Settings, *arguments: str, status: int = 0) -> Result:
    environment = contract_settings.environment(settings)
    result = CliRunner().invoke(cli.main, ["dead", *arguments], env=environment, prog_name="headrace")
    assert result.exit_code == status, (result.output, result.exception)
    return result


def lines_of(result: Result) -> list[Any]:
    return [orjson.loads(line) for line in result.stdout.splitlines()]


def request(id: str, **fields: object) -> bytes:
    return orjson.dumps({"id": id, "source": "s", "prompt": "x"} | fields)


class Graveyard:
    """Writes letters as a worker does, into partition 0 of the dead topic: the first is 0/0."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.topic = settings.names.request("default", "online", "short")
        self._publisher = Publisher(settings)
        self._publisher.start()

    def bury(
        self, values: Sequence[bytes | None], headers: Headers | None = None, *, topic: str | None = None,
        reason: str = "engine_error", at_ms: int = 1_000, offset: int = 0, key: bytes | None = b"k", room: int = ROOM,
    ) -> None:  # fmt: skip
        route = self._settings.names.parse(self.topic)
        assert route is not None
        for value in values:
            lease = Lease(topic or self.topic, 0, 1, route, collections.deque())
            item = Item(lease, offset, 1, key, value, headers or [])
            outcome = Desk("w", 1).outcome(item, Status.FAILED, at_ms, code=reason, message="a\x1b[2Jb", dead=True)
            letter = dead_letter(outcome, room)
            self._publisher.publish(self._settings.names.dead, letter.key, letter.value, letter.headers, 0)
        assert self._publisher.flush(30) == 0

    def publish(self, value: bytes, headers: Headers) -> None:
        """Into partition 0 of the request topic: the first is at offset 0."""
        self._publisher.publish(self.topic, b"k", value, headers, 0)
        assert self._publisher.flush(30) == 0

    def forget(self, before: int) -> None:
        """What retention does with the request topic."""
        client = admin.AdminClient(config.admin_config(self._settings))
        for future in client.delete_records([ck.TopicPartition(self.topic, 0, before)]).values():
            future.result(timeout=10)

    def requests(self, topic: str | None = None) -> list[Record]:
        """What stands on the request topic."""
        reader = Reader(self._settings)
        found = list(reader.records(topic or self.topic))
        reader.close()
        return found


def test_list_shows_what_the_filters_leave_and_counts_by_reason(one: Settings) -> None:
    yard = Graveyard(one)
    other = one.names.request("default", "offline", "long")
    yard.bury([request("a")], at_ms=1_000, offset=5)
    yard.bury([request("b"), request("c")], reason="inference_timeout", topic=other, at_ms=86_400_000, key=b"mine")
    yard.bury([None], reason="tombstone", at_ms=172_800_000)

    def ids(*arguments: str) -> list[Any]:
        return [line["id"] for line in lines_of(run(one, "list", "--json", *arguments))]

    assert ids() == ["a", "b", "c", None]
    assert ids("--reason", "inference_timeout") == ["b", "c"]
    assert ids("--reason", "inference_timeout", "--reason", "tombstone") == ["b", "c", None]
    assert ids("--topic", other, "--id", "c") == ["c"]
    assert ids("--since", "1970-01-02", "--until", "1970-01-03") == ["b", "c"]
    assert ids("--key", "mine") == ["b", "c"]
    assert ids("--key", identity.request_key("s", "a")) == ["a"]
    assert lines_of(run(one, "list", "--json", "--id", "a")) == [
        {
            "place": "0/0",
            "at": "1970-01-01T00:00:01+00:00",
            "reason": "engine_error",
            "origin": f"{yard.topic}/0/5",
            "attempts": 0,
            "id": "a",
            "size_bytes": len(request("a")),
            "cut_bytes": None,
            "source": "s",
            "key": identity.request_key("s", "a"),
            "record_key": "k",
            "message": "a\x1b[2Jb",
        }
    ]
    table = run(one, "list")
    assert [line.split()[0] for line in table.stdout.splitlines()[2:]] == ["0/0", "0/1", "0/2", "0/3"]
    assert table.stderr == "dead letters: 2 inference_timeout, 1 engine_error, 1 tombstone\n"
    assert run(one, "list", "--id", "nobody").stderr == "dead letters: 0\n"


def test_show_tells_everything_and_gives_the_payload_as_it_is(one: Settings) -> None:
    yard = Graveyard(one)
    payload = request("a", prompt="é\n")
    yard.bury([payload, b"\xff\x1b[2J"], [("x-mine", b"1"), ("x-mine", None)], offset=9)
    shown = run(one, "show", "0/0").stdout
    for text in ("engine_error", f"{yard.topic}/0/9", "header x-mine         1", identity.request_key("s", "a")):
        assert text in shown
    assert shown.endswith("\n" + payload.decode() + "\n")
    assert run(one, "show", "0/0", "--payload").stdout_bytes == payload
    assert run(one, "show", "0/1", "--payload").stdout_bytes == b"\xff\x1b[2J"
    assert "\x1b" not in shown + run(one, "show", "0/1").stdout, "a terminal would obey it"
    assert "0/2: no dead letter stands there" in run(one, "show", "0/2", status=1).stderr
    assert "no place such as" in run(one, "show", "3", status=2).stderr


def test_replay_needs_to_be_told_what(one: Settings) -> None:
    for arguments in ([], ["--all", "--id", "a"], ["0/0", "--id", "a"], ["0/0", "--all"]):
        assert "give one of: PLACEs, filters, --all" in run(one, "replay", *arguments, status=2).stderr


def test_replayed_record_is_the_one_that_came_without_our_headers_and_without_passed_deadlines(one: Settings) -> None:
    yard = Graveyard(one)
    own: Headers = [("x", b"1"), (Header.REPLY_TO, b"2"), ("x", None)]
    yard.bury([request("a")], [*own, (Header.DEADLINE_MS, b"1000")], key=b"mine")
    yard.bury([request("b", deadline="2020-01-01T00:00:00Z")], own, key=None)
    dry = run(one, "replay", "--all", "--dry-run")
    assert "2 would be replayed, 0 refused" in dry.stderr
    assert yard.requests() == []
    done = run(one, "replay", "--all")
    assert [line["id"] for line in lines_of(dry)] == ["a", "b"]
    # Acknowledgements of different partitions come in any order.
    assert sorted(lines_of(done), key=str) == sorted(lines_of(dry), key=str)
    assert "2 replayed, 0 refused" in done.stderr
    found = {orjson.loads(record.value or b"")["id"]: record for record in yard.requests()}
    assert (found["a"].key, found["a"].value, found["a"].headers) == (b"mine", request("a"), own)
    assert (found["b"].key, found["b"].headers) == (None, own)
    assert orjson.loads(found["b"].value or b"") == orjson.loads(request("b"))


def test_replay_keeps_the_order_of_many_and_holds_at_the_limit(one: Settings) -> None:
    yard = Graveyard(one)
    yard.bury([request(f"{n}") for n in range(3_000)])
    assert [line["id"] for line in lines_of(run(one, "replay", "--all", "--limit", "2"))] == ["0", "1"]
    run(one, "replay", "--reason", "engine_error")
    ids = [orjson.loads(record.value or b"")["id"] for record in yard.requests()]
    assert ids == ["0", "1", *map(str, range(3_000))]


def test_several_letters_of_one_request_are_one_replay(one: Settings) -> None:
    yard = Graveyard(one)
    yard.bury([request("a"), request("b"), request("a")])
    done = run(one, "replay", "--all")
    assert [line["place"] for line in lines_of(done)] == ["0/0", "0/1"]
    assert "1 left out (further letters of the same request)" in done.stderr


def test_records_without_a_request_go_only_when_named(one: Settings) -> None:
    yard = Graveyard(one)
    yard.bury([None], reason="tombstone", offset=1)
    yard.bury([b"{"], reason="invalid_json", offset=2)
    yard.bury([request("a")], offset=3)
    done = run(one, "replay", "--all")
    assert [line["id"] for line in lines_of(done)] == ["a"]
    assert "2 left out (without a readable request, to be named by PLACE)" in done.stderr
    assert [line["place"] for line in lines_of(run(one, "replay", "0/1", "0/0"))] == ["0/1", "0/0"]
    assert [record.value for record in yard.requests()] == [request("a"), b"{", None]


def test_letter_that_cannot_go_back_is_refused_alone_and_by_name(one: Settings) -> None:
    yard = Graveyard(one)
    yard.bury([request("a")], topic="somebody.elses.topic")
    yard.bury([request("b")], topic=one.names.results)
    yard.bury([request("c")], topic=one.names.request("default", "online", "gone"))
    yard.bury([request("d", prompt="x" * 99_900)], room=150_000)
    yard.bury([request("e")])
    done = run(one, "replay", "--all", status=1)
    assert [line["id"] for line in lines_of(done)] == ["e"]
    told = done.stderr.splitlines()
    assert told[:3] == [
        "0/0: somebody.elses.topic is no request topic of this installation (topics.prefix)",
        f"0/1: {one.names.results} is no request topic of this installation (topics.prefix)",
        f"0/2: there is no topic {one.names.request('default', 'online', 'gone')} any more",
    ]
    assert told[3].startswith(f"0/3: {yard.topic} does not take it: larger than 100000 bytes")
    assert told[4].startswith("1 replayed, 4 refused; ")
    assert [record.value for record in yard.requests()] == [request("e")]
    assert run(one, "replay", "0/9", status=1).stderr.startswith("0/9: no dead letter stands there")


def test_cut_letter_is_replayed_from_the_record_it_tells_of_as_long_as_that_is_there(one: Settings) -> None:
    yard = Graveyard(one)
    payload = request("a", prompt="x" * 5_000)
    headers: Headers = [("x", b"1"), (Header.DEADLINE_MS, b"1000"), (Header.KEY, b"known")]
    yard.publish(payload, headers)
    yard.bury([payload], headers, room=4_000)
    assert lines_of(run(one, "list", "--json", "--key", "known"))[0]["cut_bytes"] == len(payload)
    cut = f"the payload of {len(payload)} bytes was cut; the original {yard.topic}/0/0 is"
    assert f"{cut} still there" in run(one, "show", "0/0").stdout
    assert run(one, "show", "0/0", "--payload").stdout_bytes == payload
    run(one, "replay", "--all")
    replayed, original = sorted(yard.requests(), key=lambda record: len(record.headers))
    assert (replayed.key, replayed.value) == (original.key, payload)
    assert replayed.headers == [("x", b"1"), (Header.KEY, b"known")]

    yard.forget(before=1)
    assert f"{cut} gone" in run(one, "show", "0/0").stdout
    assert f"{cut} gone" in run(one, "show", "0/0", "--payload", status=1).stderr
    refused = run(one, "replay", "--all", status=1).stderr.splitlines()
    assert refused[0] == f"0/0: its payload of {len(payload)} bytes was cut, and the original {yard.topic}/0/0 is gone"
    assert yard.requests() == ([] if replayed.partition == 0 else [replayed])


def test_record_that_took_the_place_of_the_original_is_not_replayed_for_it(one: Settings) -> None:
    yard = Graveyard(one)
    yard.publish(request("another"), [])
    yard.bury([request("a", prompt="x" * 5_000)], room=4_000)
    assert "is gone" in run(one, "replay", "--all", status=1).stderr


def test_broker_that_is_away_is_one_line(one: Settings) -> None:
    away = build("127.0.0.1:9", "away", "confluent", kafka={"request_timeout_s": 1})
    for arguments in (["list"], ["show", "0/0"], ["replay", "--all"]):
        assert "Error: no answer from 127.0.0.1:9 within 1 s" in run(away, *arguments, status=2).stderr
