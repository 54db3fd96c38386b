"""Field case B13, byte by byte: what is around the size limit is refused, buried or stored, and nothing waits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker import records
from consumers import dead_letters
from contract.errors import HeadraceError, InvalidRequest
from contract.messages import parse_result
from contract.settings import Settings
from headrace.stack.processes import wait_for
from producers.client import Client
from producers.estimate import Estimator
from producers.prepare import Options, Preparer
from tests.acceptance.harness import World

_LIMIT_BYTES = 10_000
_BELOW_BYTES = 130
"""More than a dead letter adds in its shortest form, and than anybody's idea of a record's own overhead."""
_ABOVE_BYTES = 3
_AROUND_BYTES = 150
_PROMPTLY_S = 15.0


@pytest.fixture
def world(settings: Settings, tmp_path: Path) -> Iterator[World]:
    replace = msgspec.structs.replace
    topics = replace(settings.topics, max_message_bytes=_LIMIT_BYTES)
    one = World(replace(settings, topics=topics, engine=replace(settings.engine, max_model_len=16_384)), tmp_path)
    yield one
    one.close()


def _sized(settings: Settings, size_bytes: int, request_id: str, prompt: str) -> dict[str, Any]:
    """A request whose record, as the client publishes it, has exactly this many bytes."""
    preparer = Preparer(
        msgspec.structs.replace(settings, topics=msgspec.structs.replace(settings.topics, max_message_bytes=10**6)),
        Estimator(settings),
    )
    fields = {"id": request_id, "prompt": prompt, "max_tokens": 4}
    while True:
        record = preparer.prepare(fields, Options(bucket="short"), 0, None)
        missing = size_bytes - records.record_bytes(record.key, record.value, record.headers)
        if not missing:
            return fields
        prompt = prompt + "x" * missing if missing > 0 else prompt[:missing]
        fields["prompt"] = prompt


def test_b13_request_of_any_size_up_to_the_limit_that_fails_for_good_is_buried_and_a_larger_one_refused_at_once(
    world: World,
) -> None:
    world.worker().ready()
    sizes = range(_LIMIT_BYTES - _BELOW_BYTES, _LIMIT_BYTES + _ABOVE_BYTES + 1)
    good = 0
    for backend in ("confluent", "kafka-python"):
        chosen = msgspec.structs.replace(world.settings.client, backend=backend)
        settings = msgspec.structs.replace(world.settings, client=chosen)
        requests = [_sized(settings, size, f"{backend}-{size}", "FAULT:transient ") for size in sizes]
        refused: dict[int, HeadraceError] = {}
        started = time.monotonic()
        with Client(settings) as client:
            tickets = list(client.submit_many(requests, bucket="short", on_error=refused.__setitem__))
        assert time.monotonic() - started < _PROMPTLY_S
        assert len(tickets) == _BELOW_BYTES + 1
        assert [sizes[place] for place in refused] == [size for size in sizes if size > _LIMIT_BYTES]
        assert {error.code for error in refused.values() if isinstance(error, InvalidRequest)} == {"too_large"}
        good += len(tickets)
    world.wait_settled(good)
    wait_for(lambda: world.lag() == 0, 30, "the partitions move on")
    assert world.query("SELECT DISTINCT status, error_code FROM results") == [("failed", "fault")]
    letters = world.read(world.settings.names.dead)
    assert len(letters) == good
    origins = set()
    for letter in letters:
        headers = dict(letter.headers())
        assert headers[dead_letters.REASON] == b"fault"
        assert letter.value() or int(headers[dead_letters.CUT_BYTES]) > _LIMIT_BYTES // 2
        origins.add((headers[dead_letters.TOPIC], headers[dead_letters.PARTITION], headers[dead_letters.OFFSET]))
    assert len(origins) == good


def test_b13_answer_of_any_size_around_the_limit_is_stored_whole_and_published_whole_or_as_a_reference(
    world: World,
) -> None:
    world.worker().ready()
    request = {"prompt": "at length", "max_tokens": 1_800, "ignore_eos": True, "source": "test"}
    world.publish([request | {"id": "trial", "tags": {"pad": ""}}])
    world.wait_results(1)
    (trial,) = world.read(world.settings.names.results)
    room = _LIMIT_BYTES - records.record_bytes(trial.key(), trial.value(), trial.headers() or [])
    assert room > _AROUND_BYTES, "the trial is too long to be padded"
    pads = range(room - _AROUND_BYTES, room + _AROUND_BYTES)
    world.publish([request | {"id": f"{pad:05}", "tags": {"pad": "p" * pad}} for pad in pads])
    started = time.monotonic()
    world.wait_results(1 + len(pads), timeout_s=_PROMPTLY_S)
    wait_for(lambda: world.lag() == 0, _PROMPTLY_S, "all committed")
    assert time.monotonic() - started < 2 * _PROMPTLY_S
    whole, referred = 0, 0
    for message in world.read(world.settings.names.results):
        assert records.record_bytes(message.key(), message.value(), message.headers() or []) <= _LIMIT_BYTES
        result = parse_result(message.value())
        assert result.status == "ok"
        assert (result.output is None) == (result.output_ref is not None)
        whole += result.output is not None
        referred += result.output is None
    assert (whole + referred, min(whole, referred) > _AROUND_BYTES // 2) == (1 + len(pads), True)
    lengths = "SELECT count(DISTINCT length(output::text)) FROM results WHERE output IS NOT NULL"
    assert world.value(lengths) == 1, "each is stored whole"
    assert world.value("SELECT count(*) FROM results WHERE output IS NULL") == 0
