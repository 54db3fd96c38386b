"""Records nobody can answer, among good ones; and dead letters that cannot be written for a while."""

from __future__ import annotations

import random
import time

import pytest

from consumers import dead_letters
from headrace.stack.processes import wait_for
from tests.acceptance.harness import World
from tests.faults.row import Row, account
from tests.faults.site import Site, hold_for, refuse_writes, requests, take_writes

_RECORD_OVERHEAD_BYTES = 100
_GOOD = 50
_REFUSED_FOR_S = 5.0


def _odd(world: World, rng: random.Random) -> list[bytes | None]:
    """Every kind of unanswerable value, the last as large as a record may be."""
    limit = world.settings.topics.max_message_bytes
    values = [None, b"", b"\xff\xfe", b"{", b"[1]", b'"text"', b"x" * (limit - _RECORD_OVERHEAD_BYTES)]
    rng.shuffle(values)
    return values


def odd(site: Site, rng: random.Random, rounds: int) -> Row:
    """Undecodable, null, empty, odd headers, at the size limit; above it the publisher is told. Each is kept, dead."""
    with site.world() as world:
        world.worker().ready()
        recoveries, ids, dead = [], list[str](), 0
        for number in range(rounds):
            good = requests(rng, _GOOD, slow_ms=20, prefix=f"o{number}")
            values = _odd(world, rng)
            started = time.monotonic()
            for index, value in enumerate(values):
                headers = [
                    ("", b""),
                    ("hr-key", None),
                    ("hr-deadline", b"\xff"),
                    ("hr-tokens", b"-1"),
                    ("x", b"1" * 99),
                ]
                small = value is None or len(value) < 100
                world.publish([value], key=b"\xff\0", headers=headers if small else (), partition=index % 4)
                world.publish(good[index :: len(values)])
            with pytest.raises(AssertionError, match="MSG_SIZE_TOO_LARGE"):
                world.publish([b"x" * (world.settings.topics.max_message_bytes + 1)])
            ids += [request["id"] for request in good]
            dead += len(values)
            world.wait_settled(len(ids) + dead)
            recoveries.append(time.monotonic() - started)
        row = account("records.odd", world, ids, recoveries)
        _assert_dead(world, dead)
        assert world.value("SELECT count(*) FROM results WHERE status = 'ok'") == len(ids)
        return row


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
            hold_for(_REFUSED_FOR_S)
            assert '"publish"' in worker.get("/readyz")[1], "ready although dead letters are refused still"
            assert world.lag() > 0, "an offset has passed a record without its dead letter"
            take_writes(world, world.settings.names.dead)
            started = time.monotonic()
            worker.ready()
            world.wait_settled(len(ids) + dead)
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
