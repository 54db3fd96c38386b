"""What is sent to an endpoint and what is made of its answers, without an endpoint."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from contract.errors import InvalidRequest, TransientError
from contract.messages import Request
from contract.money import Usage
from contract.settings import Pool
from gpu_workers.engine import Prepared
from gpu_workers.engines import http_output
from gpu_workers.engines.http_params import Preparer


def _prepare(request: Request, *, dialect: Any = "vllm", context: int = 100) -> Prepared | InvalidRequest:
    preparer = Preparer(Pool(model="ours"), model="theirs", max_model_len=context)
    preparer.dialect = dialect
    return preparer.prepare([request])[0]


def _good(request: Request, **how: Any) -> Prepared:
    prepared = _prepare(request, **how)
    assert isinstance(prepared, Prepared), prepared
    return prepared


def _body(request: Request, **how: Any) -> dict[str, Any]:
    body: dict[str, Any] = orjson.loads(_good(request, **how).payload.body)
    return body


def test_an_estimate_neither_refuses_a_prompt_nor_cuts_what_it_may_generate() -> None:
    request = Request(prompt="x" * 4_000, max_tokens=70)
    assert _body(request)["max_tokens"] == 70
    assert _good(request).kv_tokens <= 100
    assert _body(Request(prompt="x", max_tokens=10**6))["max_tokens"] == 99


def test_a_prompt_of_tokens_is_counted_so_it_is_cut_and_refused() -> None:
    assert _body(Request(prompt_token_ids=[1] * 60, max_tokens=70))["max_tokens"] == 40
    refusal = _prepare(Request(prompt_token_ids=[1] * 100))
    assert isinstance(refusal, InvalidRequest)
    assert refusal.code == "context_length_exceeded"


def test_chat_and_completions_ask_for_log_probabilities_in_their_own_ways() -> None:
    chat = _body(Request(input="x", logprobs=3))
    assert (chat["logprobs"], chat["top_logprobs"]) == (True, 3)
    assert chat["messages"] == [{"role": "user", "content": "x"}]
    text = _body(Request(prompt="x", logprobs=True, top_logprobs=2))
    assert text["logprobs"] == 2
    assert "top_logprobs" not in text


def test_priority_is_spliced_into_a_body_that_stays_json() -> None:
    payload = _good(Request(prompt='a "quoted" } brace', stop=["}"])).payload
    assert orjson.loads(payload.with_priority(3)) == orjson.loads(payload.body) | {"priority": 3}


def test_half_a_surrogate_pair_is_refused_alone() -> None:
    preparer = Preparer(Pool(), model="m", max_model_len=100)
    bad, good = preparer.prepare([Request(prompt="\ud83d"), Request(prompt="fine")])
    assert isinstance(bad, InvalidRequest)
    assert bad.param == "prompt"
    assert isinstance(good, Prepared)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"[]", b"{}", b'{"choices": {}}', b'{"choices": []}', b'{"choices": [5]}',
        b'{"choices": [{"index": 1, "text": "x", "finish_reason": "stop"}]}',
        b'{"choices": [{"index": 0, "text": null, "finish_reason": "stop"}]}',
        b'{"choices": [{"index": 0, "text": "x", "finish_reason": null}]}',
        b'{"choices": [{"index": 0, "text": "x", "finish_reason": ["stop"]}]}',
        b'{"choices": [{"index": 0, "text": "x", "finish_reason": "error"}]}',
        b'{"choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": "stop"}]}',
        b'{"choices": [{"index": 0, "text": "x", "finish_reason": "stop", "logprobs": NaN}]}',
    ],
)  # fmt: skip
def test_half_an_answer_is_none(body: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - orjson's and ours
        http_output.completion(1, _good(Request(prompt="x")), body)


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 9, "completion_tokens": 4}, Usage(9, 0, 4)),
        ({"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": None}, Usage(9, 0, 4)),
        ({"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}}, Usage(9, 8, 4)),
        # counted apart from the prompt, against OpenAI's convention: clamped, and marked
        (
            {"prompt_tokens": 2, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}},
            Usage(2, 2, 4, contradictory=True),
        ),
        (None, Usage(1, 0, 3, contradictory=True)),
        ({"prompt_tokens": "9", "completion_tokens": 4}, Usage(1, 0, 3, contradictory=True)),
        ({"prompt_tokens": 9.0, "completion_tokens": 4}, Usage(1, 0, 3, contradictory=True)),
    ],
)
def test_usage_is_the_endpoints_or_marked(usage: Any, expected: Usage) -> None:
    choice = {"index": 0, "text": "twelve bytes", "finish_reason": "stop"}
    data = orjson.dumps({"choices": [choice], "usage": usage})
    assert http_output.completion(1, _good(Request(prompt="x")), data).usage == expected


def test_choices_come_in_order_and_a_message_keeps_what_else_the_endpoint_said() -> None:
    given = [
        {"index": index, "message": {"role": "assistant", "content": None, "refusal": "no", "audio": None},
         "finish_reason": "content_filter"}
        for index in (2, 0, 1)
    ]  # fmt: skip
    completion = http_output.completion(1, _good(Request(input="x", n=3)), orjson.dumps({"choices": given}))
    assert completion.choices is not None
    assert [choice["index"] for choice in completion.choices] == [0, 1, 2]
    assert completion.choices[0]["message"] == {"role": "assistant", "content": "", "refusal": "no"}


@pytest.mark.parametrize(
    ("body", "code", "param", "text"),
    [
        (b'{"error": {"message": "bad", "param": "seed", "code": 400}}', "invalid_request", "seed", "bad"),
        (b'{"error": {"message": "m", "code": "context_length_exceeded"}}', "context_length_exceeded", "prompt", "m"),
        (
            b'{"error": {"message": "m", "param": "input_tokens", "code": 400}}',
            "context_length_exceeded",
            "prompt",
            "m",
        ),
        (b'{"detail": [{"loc": ["body", "n"]}]}', "invalid_request", None, "loc"),
        (b'{"error": {"message": "m", "param": "body.seed"}}', "invalid_request", "seed", "m"),
        (b'{"error": {"message": "Grammar error: m", "param": null}}', "invalid_request", None, "Grammar"),
        (b'"no"', "invalid_request", None, "no"),
        (b"<html>\xff", "invalid_request", None, "<html>"),
        (b"", "invalid_request", None, "no reason"),
    ],
)
def test_refusal_carries_the_endpoints_message_and_param(body: bytes, code: str, param: str | None, text: str) -> None:
    refusal = http_output.refusal(400, body, _good(Request(prompt="x")).payload)
    assert (refusal.code, refusal.param) == (code, param)
    assert text in refusal.message


_VLLM_500 = b'{"error":{"message":"Internal server error","type":"InternalServerError","param":null,"code":500}}'
_WITH_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}


def test_schema_that_only_the_core_finds_wrong_is_the_requests_fault_and_any_other_500_is_not() -> None:
    plain, schema = (_good(Request(prompt="x", response_format=one)).payload for one in (None, _WITH_SCHEMA))
    refusal = http_output.failure(500, _VLLM_500, schema)
    assert isinstance(refusal, InvalidRequest)
    assert refusal.param == "response_format"
    assert isinstance(http_output.failure(500, _VLLM_500, plain), TransientError)
    nothing = {"index": 0, "text": "", "finish_reason": "stop"}
    for reason, refused in (({"stop_reason": None}, True), ({"stop_reason": "{"}, False), ({}, False)):
        data = orjson.dumps({"choices": [nothing | reason]})
        good = _good(Request(prompt="x", response_format=_WITH_SCHEMA))
        assert isinstance(http_output.completion(1, good, data).error, InvalidRequest) is refused
    for status, body in ((502, _VLLM_500), (500, b'{"error":{"message":"cannot schedule new futures"}}'), (500, b"[]")):
        assert isinstance(http_output.failure(status, body, schema), TransientError)
    assert http_output.refusal(400, b'{"error": {"message": "Grammar error: m"}}', schema).param == "response_format"


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, None),
        ("2", 2.0),
        ("0.5", 0.5),
        ("-3", 0.0),
        ("nan", None),
        ("inf", None),
        ("soon", None),
        ("", None),
        ("Thu, 01 Jan 1970 00:01:00 GMT", 50.0),
        ("Thu, 01 Jan 1970 00:00:01 GMT", 0.0),
    ],
)
def test_retry_after_is_seconds_or_a_date(header: str | None, expected: float | None) -> None:
    assert http_output.retry_after_s(header, 10.0) == expected
