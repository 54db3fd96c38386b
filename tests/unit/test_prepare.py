"""From a request to its record."""

from __future__ import annotations

import datetime as dt
import uuid
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker import records
from contract import identity, messages
from contract import settings as contract_settings
from contract.errors import InvalidRequest
from contract.messages import Request
from contract.routing import Header
from producers.estimate import Estimator
from producers.prepare import Options, Prepared, Preparer, new_id

NOW_MS = 1_764_590_000_123
SETTINGS = contract_settings.build(
    {
        "pools": {
            "default": {"default_max_tokens": 100},
            "big": {"model": "big-model"},
            "twin": {"model": "twin-model"},
            "twin2": {"model": "twin-model"},
        },
        "client": {"source": "here", "affinity_spread": 3},
        "buckets": {"version": 7},
        "topics": {"max_message_bytes": 10_000},
    }
)
PREPARER = Preparer(SETTINGS, Estimator(SETTINGS))


def prepare(request: Request | dict[str, Any], partition: int | None = None, **options: Any) -> Prepared:
    return PREPARER.prepare(request, Options(**options), NOW_MS, partition)


def headers(prepared: Prepared) -> dict[str, bytes | None]:
    return dict(prepared.headers)


def test_record_is_what_the_worker_reads_back() -> None:
    prepared = prepare({"input": "hi", "max_tokens": 3, "deadline_ms": 5_000, "new_field": 1}, partition=4)
    request, error, _ = messages.parse_request(prepared.value)
    assert error is None
    assert (request.id, request.source) == (prepared.ticket.id, "here")
    assert request.deadline == dt.datetime.fromtimestamp((NOW_MS + 5_000) / 1_000, dt.UTC)
    assert request.deadline_ms is None
    assert request.extra == {"new_field": 1}
    assert prepared.ticket.key == identity.request_key("here", prepared.ticket.id)
    assert prepared.key == prepared.ticket.key.encode()
    assert prepared.ticket.topic == "headrace.default.online.short"
    assert headers(prepared) == {
        Header.KEY: prepared.key,
        Header.TOKENS: b"4",
        Header.BUCKET_VERSION: b"7",
        Header.DEADLINE_MS: str(NOW_MS + 5_000).encode(),
        Header.REPLY_TO: b"4",
    }


def test_struct_and_mapping_give_the_same_record() -> None:
    fields = {"id": "1", "source": "s", "messages": [{"role": "user", "content": "hi"}], "seed": 3, "new": [1]}
    request, _, _ = messages.parse_request(orjson.dumps(fields))
    one, other = prepare(fields), prepare(request)
    assert orjson.loads(one.value) == orjson.loads(other.value)
    assert one.headers == other.headers


def test_mapping_of_the_caller_is_left_as_it_was() -> None:
    fields = {"input": "hi", "deadline_ms": 5}
    prepare(fields)
    assert fields == {"input": "hi", "deadline_ms": 5}


@pytest.mark.parametrize(
    ("fields", "options", "deadline_ms"),
    [
        ({"deadline_ms": 2_000}, {"deadline_s": 1.5}, NOW_MS + 1_500),
        ({"deadline": "2026-01-01T00:00:00Z", "deadline_ms": 2_000}, {}, 1_767_225_600_000),
        ({"deadline": dt.datetime(2026, 1, 1, tzinfo=dt.UTC)}, {}, 1_767_225_600_000),
        ({"deadline_ms": 2_000}, {}, NOW_MS + 2_000),
    ],
)
def test_deadline_is_absolute_in_body_and_header(
    fields: dict[str, Any], options: dict[str, Any], deadline_ms: int
) -> None:
    prepared = prepare({"input": "x"} | fields, **options)
    assert headers(prepared)[Header.DEADLINE_MS] == str(deadline_ms).encode()
    assert dt.datetime.fromisoformat(orjson.loads(prepared.value)["deadline"]).timestamp() * 1_000 == deadline_ms


def test_without_deadline_none_is_invented() -> None:
    prepared = prepare({"input": "x"})
    assert Header.DEADLINE_MS not in headers(prepared)
    assert "deadline" not in orjson.loads(prepared.value)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({}, None, "invalid_request"),
        ({"input": "x", "prompt": "y"}, None, "invalid_request"),
        ({"input": "x", "max_tokens": 4.0}, "max_tokens", "invalid_request"),
        ({"input": "x", "max_tokens": True}, "max_tokens", "invalid_request"),
        ({"input": "x", "temperature": float("nan")}, "temperature", "invalid_request"),
        ({"input": "x", "id": 0}, "id", "invalid_request"),
        ({"input": "x", "id": "i" * 513}, "id", "invalid_request"),
        ({"input": "x", "other": {1, 2}}, None, "invalid_json"),
        ({"input": "x" * 10_000}, None, "too_large"),
    ],
)
def test_wrong_request_is_refused_before_it_is_sent(fields: dict[str, Any], param: str | None, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        prepare(fields)
    assert (caught.value.param, caught.value.code) == (param, code)


@pytest.mark.parametrize(
    ("options", "param", "names"),
    [
        ({"pool": "nowhere"}, "pool", "default, big"),
        ({"class_name": "vip"}, "class_name", "online, offline"),
        ({"bucket": "xxl"}, "bucket", "short, medium, long"),
    ],
)
def test_unknown_route_names_those_there_are(options: dict[str, Any], param: str, names: str) -> None:
    with pytest.raises(InvalidRequest, match=names) as caught:
        prepare({"input": "x"}, **options)
    assert caught.value.param == param


@given(st.integers(-2, 2))
def test_limit_is_exact_to_the_byte(off: int) -> None:
    empty = prepare({"id": "1", "input": "x" * 9_000}, partition=1)
    size = records.record_bytes(empty.key, empty.value, empty.headers)
    request = {"id": "1", "input": "x" * (9_000 + 10_000 - size + off)}
    if off <= 0:
        fitting = prepare(request, partition=1)
        assert records.record_bytes(fitting.key, fitting.value, fitting.headers) == 10_000 + off
    else:
        with pytest.raises(InvalidRequest, match=f"{10_000 + off} bytes"):
            prepare(request, partition=1)


@pytest.mark.parametrize(
    ("tokens", "bucket"), [(1, "short"), (255, "short"), (256, "medium"), (1_023, "medium"), (1_024, "long")]
)
def test_bucket_follows_prompt_and_what_may_be_generated(tokens: int, bucket: str) -> None:
    prepared = prepare({"prompt_token_ids": [5], "max_tokens": tokens})
    assert prepared.ticket.topic.endswith(f".{bucket}")
    assert headers(prepared)[Header.TOKENS] == str(tokens + 1).encode()
    assert prepare({"prompt_token_ids": [5], "max_tokens": tokens, "n": 2}).ticket.topic.endswith(
        ".short" if tokens == 1 else ".medium" if tokens < 512 else ".long"
    )


def test_model_finds_the_one_pool_that_serves_it() -> None:
    assert prepare({"input": "x", "model": "big-model"}).ticket.topic == "headrace.big.online.medium"
    for model in ("twin-model", "unheard-of", "tiny-llama"):
        assert ".default." in prepare({"input": "x", "model": model}).ticket.topic
    assert ".twin." in prepare({"input": "x", "model": "big-model"}, pool="twin").ticket.topic


def test_equal_affinities_share_few_keys_and_a_resubmission_keeps_its_own() -> None:
    keys = {prepare({"id": str(n), "input": "x", "affinity": "tenant"}).key for n in range(200)}
    assert keys == {b"tenant#0", b"tenant#1", b"tenant#2"}
    again = {prepare({"id": "7", "input": "x", "affinity": "tenant"}).key for _ in range(5)}
    assert len(again) == 1


@given(st.text(st.characters(), min_size=1, max_size=30), st.text(st.characters(), max_size=30))
def test_key_matches_the_workers_for_any_id_and_text(request_id: str, text: str) -> None:
    prepared = prepare({"id": request_id, "source": text, "input": text})
    request, error, _ = messages.parse_request(prepared.value)
    assert error is None
    assert request.id is not None
    assert identity.request_key(request.source, request.id) == prepared.ticket.key
    assert request.input == messages.clean_surrogates(text)


def test_ids_are_uuid7_in_order_of_time_and_unique() -> None:
    ids = [new_id(NOW_MS + n // 100) for n in range(5_000)]
    assert len(set(ids)) == 5_000
    parsed = uuid.UUID(ids[-1])
    assert (parsed.version, parsed.variant) == (7, uuid.RFC_4122)
    assert new_id(NOW_MS) < new_id(NOW_MS + 1)
