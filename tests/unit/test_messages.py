"""Messages: what is parsed, what is refused and how it says so, what goes out again, and the published schema."""

from __future__ import annotations

import base64
import datetime as dt
import json
import math
from typing import Any

import jsonschema
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract import messages
from contract.messages import Request, Result, UsageBody, encode, parse_request, parse_result
from contract.statuses import Status
from tests.data import field_case

GOOD: dict[str, Any] = {"id": "a-1", "source": "s", "input": "hi"}
REQUEST_SCHEMA = jsonschema.Draft202012Validator({"$ref": "#/$defs/Request", "$defs": messages.schemas()["$defs"]})

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
fields = st.sampled_from(Request.__struct_fields__) | texts
times = st.datetimes(timezones=st.timezones() | st.just(dt.UTC)).map(lambda at: at.astimezone(dt.UTC))


def parse(**changes: Any) -> tuple[Request, Any]:
    tree = {name: value for name, value in (GOOD | changes).items() if value is not ...}
    return parse_request(json.dumps(tree, ensure_ascii=False).encode())[:2]


# What comes in --------------------------------------------------------------------------------------------------------


@given(st.binary() | st.binary().map(lambda tail: b'{"id":"a","input":"\\u' + tail))
def test_no_bytes_make_parsing_raise(value: bytes) -> None:
    request, error, _ = parse_request(value)
    assert isinstance(request, Request)
    assert error is not None


@given(st.dictionaries(fields, json_values, max_size=6), st.booleans())
def test_no_json_makes_parsing_raise_and_the_schema_takes_all_that_is_accepted(
    tree: dict[str, Any], good: bool
) -> None:
    value = json.dumps(tree | GOOD if good else tree).encode()
    request, error, _ = parse_request(value)
    if error is None:
        REQUEST_SCHEMA.validate(orjson.loads(value))
        again, error, _ = parse_request(encode(request))
        assert (again, error) == (request, None)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (None, "tombstone"),
        (b"", "empty_value"),
        (b"{", "invalid_json"),
        (b"\xef\xbb\xbf{}", "invalid_json"),
        (b'{"input": NaN}', "invalid_json"),
        (b'{"input": NaN, "id": "\\ud83d"}', "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"input":"\\ud83d","x":' + b"[" * 100_000, "invalid_json"),
        (b'{"input":"\\ud83d","x":' + b"[" * 900 + b"]" * 900 + b"}", "none or invalid_json"),
        (b'{"x": ' + b"9" * 5_000 + b', "input":"\\ud83d"}', "invalid_json"),
        (b"3", "not_an_object"),
        (b"[]", "not_an_object"),
        (b'"text"', "not_an_object"),
        (b"null", "not_an_object"),
        (b"{}", "invalid_request"),
    ],
)
def test_value_that_is_no_request_has_a_code(value: bytes | None, code: str) -> None:
    _, error, _ = parse_request(value)
    assert (error.code if error else "none") in code


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 4.0),
        ("max_tokens", True),
        ("max_tokens", "4"),
        ("max_tokens", 0),
        ("max_tokens", 2**70),
        ("seed", 1.0),
        ("seed", 2**63),
        ("temperature", "0.5"),
        ("temperature", 2.5),
        ("top_p", 0),
        ("n", 0),
        ("n", 129),
        ("ignore_eos", 1),
        ("logprobs", 2.0),
        ("logit_bias", {"5": 101}),
        ("stop", [1]),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("messages", [{"content": "no role"}]),
        ("messages", []),
        ("prompt_token_ids", [1.0]),
        ("deadline", "2026-01-01T00:00:00"),
        ("deadline", "tomorrow"),
        ("deadline_ms", 0),
        ("tags", {"a": 1}),
        ("on_failure", "shrug"),
        ("id", ""),
        ("id", "x" * 513),
        ("id", 7),
        ("v", 2),
    ],
)
def test_wrong_field_is_named_and_the_envelope_survives(field: str, value: Any) -> None:
    changes: dict[str, Any] = {field: value}
    if field in ("messages", "prompt_token_ids"):
        changes["input"] = ...
    request, error = parse(business_line="ads", custom_id="c-7", **changes)
    assert error is not None
    assert (error.param or "").startswith(field)
    assert (request.id, request.source) == (None if field == "id" else "a-1", "s")
    assert (request.business_line, request.custom_id) == ("ads", "c-7")


def test_integer_where_a_float_is_meant_is_fine() -> None:
    request, error = parse(temperature=0, top_p=1, logit_bias={"5": 1})
    assert error is None
    assert (request.temperature, request.logit_bias) == (0.0, {"5": 1.0})


@pytest.mark.parametrize("given_fields", [[], ["input", "messages"], ["prompt", "prompt_token_ids", "input"]])
def test_exactly_one_kind_of_prompt(given_fields: list[str]) -> None:
    kinds = {"input": "x", "messages": [{"role": "user", "content": "x"}], "prompt": "x", "prompt_token_ids": [1]}
    _, error, _ = parse_request(orjson.dumps({name: kinds[name] for name in given_fields}))
    assert error is not None
    assert "exactly one" in error.message


def test_unknown_fields_are_kept_and_go_out_again() -> None:
    request, error = parse(new_parameter={"deep": [1]}, other=None)
    assert error is None
    assert request.extra == {"new_parameter": {"deep": [1]}, "other": None}
    assert orjson.loads(encode(request)) == GOOD | {"new_parameter": {"deep": [1]}, "other": None}


def test_half_an_emoji_is_mended_and_the_rest_of_the_text_is_kept() -> None:
    request, error, _ = parse_request(
        b'{"id":"a","input":"cut \\ud83d, whole \\ud83d\\ude00 \\u0000","tags":{"k\\udc00":"v"}}'
    )
    assert error is None
    assert request.input == "cut \ufffd, whole \U0001f600 \0"
    assert request.tags == {"k\ufffd": "v"}


def test_records_with_odd_envelopes_parse_by_their_value_alone() -> None:
    """B11: the value decides; what is no value has its own code."""
    codes = []
    for record in field_case("B11-records.jsonl"):
        value = record["value_b64"]
        _, error, _ = parse_request(None if value is None else base64.b64decode(value))
        codes.append(error.code if error else "good")
    assert codes == ["good", "tombstone", "empty_value", *["good"] * 6, "tombstone"]


# What goes out --------------------------------------------------------------------------------------------------------


@given(
    st.builds(
        Request,
        id=st.none() | texts.filter(bool),
        source=texts,
        input=texts,
        max_tokens=st.none() | st.integers(1, 10_000_000),
        temperature=st.floats(0, 2),
        stop=st.none() | texts.filter(bool) | st.lists(texts.filter(bool), max_size=16),
        seed=st.none() | st.integers(-(2**63), 2**63 - 1),
        logprobs=st.none() | st.booleans() | st.integers(0, 20),
        deadline=st.none() | times,
        tags=st.none() | st.dictionaries(texts, texts, max_size=3),
    )
)
def test_request_comes_back_as_it_was_sent(request: Request) -> None:
    value = encode(request)
    REQUEST_SCHEMA.validate(json.loads(value))
    assert parse_request(value) == (request, None, False)


def test_result_comes_back_as_it_was_sent() -> None:
    result = Result(
        key="k", status=Status.FAILED, id="a", usage=UsageBody(prompt_tokens=3), cost_usd="0.000001", tags={"a": "b"}
    )
    result.error = messages.ErrorBody(code="c", message="m")
    value = encode(result, output=b'{"choices":[]}')
    result.output = {"choices": []}
    assert parse_result(value) == result
    schema = {"$ref": "#/$defs/Result", "$defs": messages.schemas()["$defs"]}
    jsonschema.Draft202012Validator(schema).validate(json.loads(value))


def test_published_schema_is_a_schema_and_tells_request_from_result() -> None:
    schemas = messages.schemas()
    jsonschema.Draft202012Validator.check_schema(schemas)
    validator = jsonschema.Draft202012Validator(schemas)
    assert validator.is_valid(GOOD)
    assert validator.is_valid({"key": "k", "status": "ok"})
    assert validator.is_valid(GOOD | {"key": "an unknown field of a request", "status": "ok"}), "unknown is not fatal"
    assert not validator.is_valid({"max_tokens": "4"})
    every = schemas["$defs"]["Request"]["properties"]
    assert set(every) == set(Request.__struct_fields__) - {"extra"}


def test_model_outputs_that_json_or_postgres_cannot_hold() -> None:
    """B14: replaced by U+FFFD and marked; what can be held comes back unchanged."""
    for case in field_case("B14-model-outputs.json"):
        data, altered = messages.dump_output({"choices": [{"text": case["value"]}]})
        stored = orjson.loads(data)["choices"][0]["text"]
        text = json.dumps(case["value"], ensure_ascii=False)
        broken = "\\u0000" in json.dumps(case["value"]).replace("\\\\", "") or not _is_utf8(text)
        assert altered is broken, case["name"]
        assert (stored == case["value"]) is not broken, case["name"]
        assert b"\\u0000" not in data.replace(b"\\\\u0000", b""), case["name"]


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@given(json_values | st.text())
def test_cleaning_is_done_once(value: Any) -> None:
    cleaned, _ = messages.clean_json(value)
    assert messages.clean_json(cleaned) == (cleaned, False)
    json.dumps(cleaned, allow_nan=False, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("logprob", "written"),
    [(-math.inf, -9999.0), (math.inf, None), (math.nan, None), (None, None), (-0.5, -0.5), (0.0, 0.0), (-1e9, -9999.0)],
)
def test_log_probabilities_that_json_cannot_write(logprob: float | None, written: float | None) -> None:
    """B20."""
    assert messages.json_logprob(logprob) == written


def test_deadline_with_an_offset_is_the_same_moment() -> None:
    request, error = parse(deadline="2026-01-01T02:00:00+02:00")
    assert error is None
    assert request.deadline == dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
