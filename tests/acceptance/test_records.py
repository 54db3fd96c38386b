"""Records as the world sends them: field cases B10, B11, B14 (as prompts), B20, and dead letters."""

from __future__ import annotations

import base64
import json
import signal
from pathlib import Path

import msgspec
import orjson
import pytest

from consumers import dead_letters
from contract.messages import LOGPROB_FLOOR
from contract.settings import Settings
from headrace.stack.processes import wait_for
from tests.acceptance.harness import World
from tests.data import field_case


def _decode(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)


def test_b11_null_values_null_headers_and_odd_bytes_do_not_stop_the_partition(world: World) -> None:
    worker = world.worker().ready()
    records = field_case("B11-records.jsonl")
    for record in records:
        headers = [(name, _decode(value)) for name, value in record["headers"] or []]
        value = _decode(record["value_b64"])
        # The file's requests name a model of their own; ours is the pool's.
        if value:
            value = value.replace(b'"model":"test-model",', b"")
        world.publish([value], partition=0, key=_decode(record["key_b64"]), headers=headers)
    wait_for(lambda: world.committed(world.topic())[0] == 10, 30, "the last tombstone is committed")
    by_offset = dict(world.query("SELECT record_offset, status FROM results"))
    assert by_offset == {0: "ok", 1: "invalid", 2: "invalid", **dict.fromkeys(range(3, 9), "ok"), 9: "invalid"}
    reasons = [dict(message.headers())[dead_letters.REASON] for message in world.read(world.settings.names.dead)]
    assert sorted(reasons) == [b"empty_value", b"tombstone", b"tombstone"]
    metrics = worker.get("/metrics")[1]
    assert 'headrace_dead_letters_total{reason="tombstone"} 2.0' in metrics
    assert 'headrace_dead_letters_total{reason="empty_value"} 1.0' in metrics


def test_b10_hanging_record_is_run_again_after_a_kill_and_nothing_commits_past_it(world: World) -> None:
    worker = world.worker().ready()
    requests = world.requests(3)
    requests[0]["prompt"] = "FAULT:slow=600000 hang"
    world.publish(requests, partition=0)
    world.wait_settled(2)
    wait_for(lambda: len(world.results()) == 2, 30, "the two later ones are published")
    assert world.committed(world.topic())[0] in (0, -1001)
    worker.child.send(signal.SIGKILL)
    worker.child.wait(10)
    world.worker().ready()
    wait_for(lambda: len(world.results()) == 4, 60, "11 and 12 are answered from the store")
    assert world.committed(world.topic())[0] in (0, -1001)
    assert world.value("SELECT count(*) FROM attempts WHERE waste IS NULL") == 2


def test_b10_transient_failure_is_tried_once_more_and_answered(world: World) -> None:
    world.worker().ready()
    requests = world.requests(3)
    requests[0]["prompt"] = "FAULT:transient-once please"
    world.publish(requests, partition=0)
    world.wait_settled(3)
    assert world.value("SELECT attempt FROM results WHERE id = 'r-0'") == 2
    assert world.query("SELECT waste, charge_usd FROM attempts WHERE waste IS NOT NULL") == [("retry", 0)]
    wait_for(lambda: world.committed(world.topic())[0] == 3, 30, "all committed")
    world.assert_sound(3)


def test_always_failing_request_is_failed_and_kept_as_a_dead_letter(world: World) -> None:
    world.worker().ready()
    request = world.requests(1)[0] | {"prompt": "FAULT:transient please"}
    world.publish([request], partition=0, key=b"k", headers=[("x-mine", b"1")])
    world.wait_settled(1)
    assert world.query("SELECT outcome FROM settled") == [("failed",)]
    [letter] = wait_for(lambda: world.read(world.settings.names.dead), 30, "a dead letter")
    headers = dict(letter.headers())
    assert letter.key() == b"k"
    assert orjson.loads(letter.value()) == request
    assert headers["x-mine"] == b"1"
    assert headers[dead_letters.TOPIC] == world.topic().encode()
    assert headers[dead_letters.OFFSET] == b"0"
    assert headers[dead_letters.ATTEMPTS] == b"2"


def test_b14_text_that_postgres_cannot_hold_is_answered_and_marked(world: World) -> None:
    world.worker().ready()
    cases = field_case("B14-model-outputs.json")
    requests = world.requests(50)
    for index, case in enumerate(cases):
        value = case["value"] if isinstance(case["value"], str) else "k\0"
        requests[index] |= {"prompt": f"say {value}", "business_line": value, "tags": {value: value}}
    requests[20]["prompt"] = "FAULT:nul"
    requests[21]["prompt"] = "FAULT:surrogate"
    # json writes lone surrogates as escapes, as a careless publisher does
    world.publish([json.dumps(request).encode() for request in requests])
    world.wait_settled(50)
    results = {result.id: result for result in world.wait_results(50)}
    assert {result.status for result in results.values()} == {"ok"}
    harmless = ("good pair", "replacement", "noncharacter", "byte order mark", "other controls", "backslash u")
    for index, case in enumerate(cases):
        assert results[f"r-{index}"].altered is not case["name"].startswith(harmless), case["name"]
        if case["name"].startswith(harmless):
            assert results[f"r-{index}"].business_line == case["value"]
    assert results["r-20"].altered
    assert results["r-21"].altered
    assert not results["r-30"].altered
    world.assert_sound(50)


def test_b20_logprobs_that_json_cannot_write_keep_the_answer(world: World) -> None:
    world.worker().ready()
    world.publish([world.requests(1)[0] | {"prompt": "FAULT:logprobs", "logprobs": 2}])
    [result] = world.wait_results(1)
    assert result.status == "ok"
    text = orjson.dumps(result.output).decode()
    json.loads(text, parse_constant=lambda name: (_ for _ in ()).throw(ValueError(name)))
    assert str(LOGPROB_FLOOR) in text


def test_wrong_requests_are_refused_by_name_and_leave_neighbours_alone(world: World) -> None:
    world.worker().ready()
    wrong: list[dict[str, object]] = [
        {"id": "bad-0", "prompt": "x", "max_tokens": 4.0},
        {"id": "bad-1", "prompt": "x", "temperature": 3},
        {"id": "bad-2"},
        {"id": "bad-3", "prompt": "x", "messages": [{"role": "user", "content": "x"}]},
        {"id": "bad-4", "prompt": "x", "model": "no-such-model"},
        {"id": "bad-5", "prompt": "x", "stop": [""]},
    ]
    world.publish([*world.requests(10), *wrong])
    world.wait_settled(16)
    refused = dict(world.query("SELECT id, error_param FROM results WHERE status = 'invalid'"))
    assert refused == {
        "bad-0": "max_tokens", "bad-1": "temperature", "bad-2": None, "bad-3": None, "bad-4": "model", "bad-5": "stop",
    }  # fmt: skip
    assert world.value("SELECT count(*) FROM results WHERE status = 'ok'") == 10
    assert world.read(world.settings.names.dead) == []


def test_answer_larger_than_a_record_is_stored_whole_and_published_as_a_reference(
    settings: Settings, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    replace = msgspec.structs.replace
    settings = replace(
        settings,
        topics=replace(settings.topics, max_message_bytes=10_000),
        engine=replace(settings.engine, max_model_len=16_384),
    )
    world = World(settings, tmp_path)
    request.addfinalizer(world.close)
    world.worker().ready()
    big = world.requests(1)[0] | {"max_tokens": 8_000, "ignore_eos": True}
    world.publish([big, *world.requests(5, prefix="small")])
    results = {result.id: result for result in world.wait_results(6)}
    assert results["r-0"].output is None
    assert results["r-0"].output_ref is not None
    assert world.value("SELECT length(output::text) FROM results WHERE id = 'r-0'") > 10_000
    wait_for(lambda: world.lag() == 0, 30, "all committed")


def test_dead_letter_of_a_record_at_the_limit_fits(world: World) -> None:
    world.worker().ready()
    limit = world.settings.topics.max_message_bytes
    world.publish([b"x" * (limit - 200)], partition=0, headers=[("a", b"b" * 20)])
    [letter] = wait_for(lambda: world.read(world.settings.names.dead), 30, "a dead letter")
    headers = dict(letter.headers())
    assert headers[dead_letters.REASON] == b"invalid_json"
    wait_for(lambda: world.lag() == 0, 30, "the partition moves on")


def test_expired_deadline_is_not_run(world: World) -> None:
    world.worker().ready()
    world.publish([world.requests(1)[0] | {"deadline": "2026-01-01T00:00:00Z"}])
    world.wait_settled(1)
    assert world.query("SELECT outcome FROM settled") == [("expired",)]
    assert world.value("SELECT count(*) FROM attempts") == 0


def test_records_that_retention_took_are_counted_as_lost_not_skipped_in_silence(world: World) -> None:
    first = world.worker().ready()
    world.publish(world.requests(5), partition=0)
    wait_for(lambda: world.committed(world.topic())[0] == 5, 30, "five are done")
    assert first.terminate() == 0
    world.publish(world.requests(10, prefix="late"), partition=0)
    world.delete_records(world.topic(), 0, before=12)
    second = world.worker().ready()
    world.wait_settled(8)
    assert 'headrace_lost_records_total{class="online"} 7.0' in second.get("/metrics")[1]
