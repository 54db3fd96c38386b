"""Records nobody can answer, among good ones; and dead letters that cannot be written for a while."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import kafka
import orjson
import pytest

from broker import kafka_python
from consumers import dead_letters
from headrace.stack.processes import wait_for
from tests.acceptance.harness import World
from tests.faults.row import Row, account
from tests.faults.site import Site, hold_for, refuse_writes, requests, set_topic, take_writes

_RECORD_OVERHEAD_BYTES = 100
_GOOD = 50
_NO_TIMESTAMP, _EPOCH_MS = -1, 0
_ODD_HEADERS = (("", b""), ("hr-key", None), ("hr-deadline", b"\xff"), ("hr-tokens", b"-1"), ("x", b"1" * 99))


def _odd(world: World, rng: random.Random) -> list[bytes | None]:
    """Every kind of unanswerable value, the last as large as a record may be."""
    limit = world.settings.topics.max_message_bytes
    values = [None, b"", b"\xff\xfe", b"{", b"[1]", b'"text"', b"x" * (limit - _RECORD_OVERHEAD_BYTES)]
    rng.shuffle(values)
    return values


def odd(site: Site, rng: random.Random, rounds: int) -> Row:
    """Undecodable, null, empty, odd headers, no timestamp, at the size limit; above it the publisher is told."""
    with site.world() as world:
        set_topic(world, world.topic(), "message.timestamp.type", "CreateTime")  # else the broker dates every record
        world.worker().ready()
        recoveries, ids, dead = [], list[str](), 0
        for number in range(rounds):
            good = requests(rng, _GOOD, slow_ms=20, prefix=f"o{number}")
            (old,) = requests(rng, 1, slow_ms=20, prefix=f"old{number}")
            values = _odd(world, rng)
            started = time.monotonic()
            for index, value in enumerate(values):
                small = value is None or len(value) < 100
                world.publish([value], key=b"\xff\0", headers=_ODD_HEADERS if small else (), partition=index % 4)
                world.publish(good[index :: len(values) + 1])
            publish_dated(world, good[len(values) :: len(values) + 1], _NO_TIMESTAMP)
            publish_dated(world, [old], _EPOCH_MS)
            with pytest.raises(AssertionError, match="MSG_SIZE_TOO_LARGE"):
                world.publish([b"x" * (world.settings.topics.max_message_bytes + 1)])
            ids += [request["id"] for request in (*good, old)]
            dead += len(values)
            world.wait_settled(len(ids) + dead, timeout_s=120)
            recoveries.append(time.monotonic() - started)
        row = account("records.odd", world, ids, recoveries)
        _assert_dead(world, dead)
        assert world.value("SELECT count(*) FROM results WHERE status = 'ok'") == len(ids) - rounds
        expired = world.query("SELECT id, error_code FROM results WHERE status = 'expired' ORDER BY id")
        assert expired == [(f"old{number}-0", "too_old") for number in range(rounds)]
        return row


def publish_dated(world: World, batch: Sequence[Mapping[str, Any]], timestamp_ms: int) -> None:
    """Records with a timestamp of the caller's, which librdkafka does not let one leave out."""
    producer = kafka.KafkaProducer(**kafka_python.producer_config(world.settings))
    try:
        sent = [
            producer.send(world.topic(), orjson.dumps(one), one["id"].encode(), timestamp_ms=timestamp_ms)
            for one in batch
        ]
        for future in sent:
            future.get(30)
    finally:
        producer.close(10)


def dead_refused(site: Site, rng: random.Random, rounds: int) -> Row:
    """The dead-letter topic refuses writes for a while: intakes hold, no offset passes, then all letters go out."""
    with site.world() as world:
        worker = world.worker().ready()
        recoveries, ids, dead = [], list[str](), 0
        for number in range(rounds):
            refuse_writes(world, world.settings.names.dead)
            good = requests(rng, _GOOD, slow_ms=20, prefix=f"d{number}")
            world.publish([*good[: _GOOD // 2], *_odd(world, rng), *good[_GOOD // 2 :]])
            ids += [request["id"] for request in good]
            dead += len(_odd(world, rng))
            wait_for(lambda: '"publish"' in worker.get("/readyz")[1], 30, "not ready while dead letters are refused")
            hold_for(site.outage_s)
            assert '"publish"' in worker.get("/readyz")[1], "ready although dead letters are refused still"
            assert world.lag() > 0, "an offset has passed a record without its dead letter"
            take_writes(world, world.settings.names.dead)
            started = time.monotonic()
            worker.ready()
            world.wait_settled(len(ids) + dead, timeout_s=120)
            recoveries.append(time.monotonic() - started)
        row = account("records.dead_refused", world, ids, recoveries)
        _assert_dead(world, dead)
        return row


def _assert_dead(world: World, count: int) -> None:
    """Each unanswerable record has its outcome and one dead letter that says where it came from."""
    letters = world.read(world.settings.names.dead)
    origins = {
        tuple(
            dict(letter.headers())[name] for name in (dead_letters.TOPIC, dead_letters.PARTITION, dead_letters.OFFSET)
        )
        for letter in letters
    }
    assert len(origins) == len(letters) == count
    assert world.value("SELECT count(*) FROM results WHERE status = 'invalid'") == count
