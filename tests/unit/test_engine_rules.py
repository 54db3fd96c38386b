"""What engines refuse, and with which words; and the shape of what they answer."""

from __future__ import annotations

import math
from typing import Any

import pytest

from contract.errors import InvalidRequest
from contract.messages import Request
from gpu_workers.engines import choices, rules

_TOOL = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"model": "other"}, "model_not_found", "model"),
        ({"tools": _TOOL}, "unsupported_parameter", "tools"),
        ({"tools": _TOOL, "tool_choice": "auto"}, "unsupported_parameter", "tools"),
        ({"tool_choice": "required"}, "invalid_request", "tool_choice"),
        ({"n": 2, "temperature": 0.0}, "invalid_request", "n"),
        ({"min_tokens": 9, "max_tokens": 8}, "invalid_request", "min_tokens"),
    ],
)
def test_what_no_engine_of_ours_does_is_refused_by_name(fields: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        rules.check(Request(prompt="x", **fields), "ours")
    assert (caught.value.code, caught.value.param) == (code, param)


@pytest.mark.parametrize(
    "fields", [{"model": "ours"}, {"tools": _TOOL, "tool_choice": "none"}, {"tools": []}, {"tool_choice": "auto"}]
)
def test_harmless_forms_of_the_same_fields_pass(fields: dict[str, Any]) -> None:
    rules.check(Request(prompt="x", **fields), "ours")


def test_prompt_must_leave_room_and_max_tokens_is_cut_to_it() -> None:
    request = Request(prompt="x", max_tokens=50, min_tokens=40)
    assert rules.output_limits(request, 9, 10, 256) == (1, 1)
    assert rules.output_limits(request, 1, 1_000, 256) == (50, 40)
    for tokens in (10, 11):
        with pytest.raises(InvalidRequest, match=rf"{tokens} tokens.*holds 10 tokens") as caught:
            rules.output_limits(request, tokens, 10, 256)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(InvalidRequest, match="empty"):
        rules.output_limits(request, 0, 10, 256)


def test_default_max_tokens_gives_way_to_min_tokens() -> None:
    assert rules.output_limits(Request(prompt="x", min_tokens=300), 10, 1_000, 256) == (300, 300)
    assert rules.output_limits(Request(prompt="x"), 10, 1_000, 256) == (256, 0)


@pytest.mark.parametrize("ids", [[1, -1], [10], [1.0], [True], ["1"], [2**70]])
def test_token_id_that_is_not_one_of_the_vocabulary_is_refused(ids: list[Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        rules.check_token_ids(ids, 10, "prompt_token_ids")
    assert caught.value.param == "prompt_token_ids"


def test_logit_bias_keys_become_token_ids() -> None:
    assert rules.token_bias(Request(prompt="x", logit_bias={"5": 1, "07": -2.5}), 10) == {5: 1.0, 7: -2.5}
    assert rules.token_bias(Request(prompt="x", logit_bias={}), 10) is None
    for wrong in ({"10": 1.0}, {"-1": 1.0}, {"x": 1.0}, {"٥": 1.0}, {"9" * 5_000: 1.0}, {"5": math.nan}, {"": 1.0}):
        with pytest.raises(InvalidRequest) as caught:
            rules.token_bias(Request(prompt="x", logit_bias=wrong), 10)
        assert caught.value.param == "logit_bias"


def test_both_forms_of_logprobs_mean_a_number() -> None:
    assert rules.logprob_count(Request(logprobs=True, top_logprobs=4)) == 4
    assert rules.logprob_count(Request(logprobs=True)) == 0
    assert rules.logprob_count(Request(logprobs=3)) == 3
    assert rules.logprob_count(Request(logprobs=False)) is None
    with pytest.raises(InvalidRequest):
        rules.logprob_count(Request(top_logprobs=3))


def test_response_formats() -> None:
    schema = {"type": "object"}
    assert rules.response_schema(Request()) is None
    assert rules.response_schema(Request(response_format={"type": "text"})) is None
    assert rules.response_schema(Request(response_format={"type": "json_object"})) == "json_object"
    whole = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert rules.response_schema(Request(response_format=whole)) == schema
    for wrong in ({}, {"type": "grammar"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}):
        with pytest.raises(InvalidRequest) as caught:
            rules.response_schema(Request(response_format=wrong))
        assert (caught.value.param or "").startswith("response_format")


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"skip_special_tokens": "no"}, "skip_special_tokens"),
        ({"bad_words": [1]}, "bad_words"),
        ({"priority": 0.0}, "priority"),
        ({"stream": 0}, "stream"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"zz": 1, "max_completion_tokens": 9}, "max_completion_tokens"),
    ],
)
def test_parameter_that_other_servers_know_and_we_do_not_pass_on_is_refused(extra: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest, match=param) as caught:
        rules.check(Request(prompt="x", extra=extra), "ours")
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", param)
    rules.check(Request(prompt="x", extra={"user": "u", "stream": False, "priority": 0, "best_of": None}), "ours")


def _schema(schema: dict[str, Any]) -> Any:
    return rules.response_schema(
        Request(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    )


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"enum": ["x" * 70_000]}, "65536 bytes"),
        ({"items": {"anyOf": [{"minItems": 10**8}]}}, "minItems.*10000"),
        ({"maxItems": 1e300}, "maxItems"),
        ({"properties": {"a": {"pattern": "a\0"}}}, "U\\+0000"),
    ],
)
def test_schema_that_no_compiler_should_be_asked_for_is_refused(schema: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text) as caught:
        _schema(schema)
    assert caught.value.param == "response_format"


def test_schema_of_a_size_that_people_use_passes_as_it_is() -> None:
    schema = {"properties": {"minItems": {"type": "integer"}, "a": {"maxItems": 10_000, "minItems": 0, "const": True}}}
    assert _schema(schema) is schema
    deep: dict[str, Any] = {}
    for _ in range(400):
        deep = {"items": deep}
    with pytest.raises(InvalidRequest, match="cannot be written"):
        _schema(deep)


def test_message_content_becomes_text_or_is_refused_by_its_place() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": parts, "name": "n"},
        {"role": "assistant", "content": None},
    ]
    assert rules.chat_messages(Request(messages=messages)) == [
        {"role": "user", "content": "a\nb", "name": "n"},
        {"role": "assistant", "content": ""},
    ]
    image = [{"type": "image_url", "image_url": {"url": "http://x"}}]
    for wrong in (5, {"a": 1}, image, ["text"], [{"type": "text"}], [{"type": "text", "text": 5}]):
        with pytest.raises(InvalidRequest) as caught:
            rules.chat_messages(
                Request(messages=[{"role": "user", "content": "x"}, {"role": "user", "content": wrong}])
            )
        assert caught.value.param == "messages[1].content"


def test_logprobs_have_openais_shapes_and_only_numbers_that_json_can_write() -> None:
    entries = [
        choices.TokenLogprob("ab", -math.inf, [("ab", -math.inf), ("é", -1.0)]),
        choices.TokenLogprob("c", math.nan, [("d", math.inf), ("e", None)]),
    ]
    assert choices.logprobs(entries, chat=True)["content"][0] == {
        "token": "ab",
        "logprob": -9999.0,
        "bytes": [97, 98],
        "top_logprobs": [
            {"token": "ab", "logprob": -9999.0, "bytes": [97, 98]},
            {"token": "é", "logprob": -1.0, "bytes": [195, 169]},
        ],
    }
    assert choices.logprobs(entries, chat=False) == {
        "tokens": ["ab", "c"],
        "token_logprobs": [-9999.0, None],
        "top_logprobs": [{"ab": -9999.0, "é": -1.0}, {"d": None, "e": None}],
        "text_offset": [0, 2],
    }
