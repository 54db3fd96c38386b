"""Requests as strangers write them: any JSON for any generation parameter, often within its range; any JSON schema."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from contract.messages import Request
from gpu_workers.engines import rules


def response_format(schema: Any) -> dict[str, Any]:
    """OpenAI's way to ask for answers that follow ``schema``."""
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


_ENVELOPE = {"v", "id", "source", "deadline", "deadline_ms", "business_line", "type", "tags", "cache", "affinity"}
_ENVELOPE |= {"store", "on_failure", "batch_id", "custom_id", "extra"}
GENERATION = sorted(set(Request.__struct_fields__) - _ENVELOPE)

_text = (
    st.text(st.characters(codec=None, categories=None), max_size=12)
    | st.sampled_from(["", "\0", "\ud83d"])
    | st.just(9_999).map("x".__mul__)
)
_edges = st.sampled_from(
    [0, -0.0, 1, -1, 1.0, 4.0, 0.5, 1e-320, 1e308, -1e308, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64, 2**70]
)
_number = _edges | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
_anything = st.recursive(
    st.none() | st.booleans() | _number | _text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=5,
)
_count = st.integers(0, 9) | _number
_pattern = st.text("ab01.*+?|()[]{}^$\\,-", max_size=12) | _text
schemas = st.recursive(
    st.booleans()
    | st.fixed_dictionaries(
        {"type": st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object"])},
        optional={
            "pattern": _pattern,
            "format": st.sampled_from(["date", "uuid", "email", "x"]) | _text,
            "minLength": _count,
            "maxLength": _count,
            "minimum": _number,
            "exclusiveMaximum": _number,
            "multipleOf": _number,
            "minItems": _count,
            "maxItems": _count,
            "uniqueItems": st.booleans(),
            "enum": st.lists(_anything, max_size=3),
            "const": _anything,
        },
    ),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["array", "object"]) | _anything,
            "properties": st.dictionaries(_text, inner, max_size=3) | _anything,
            "required": st.lists(_text, max_size=2),
            "additionalProperties": inner,
            "patternProperties": st.dictionaries(_pattern, inner, max_size=2),
            "items": inner,
            "prefixItems": st.lists(inner, max_size=3),
            "anyOf": st.lists(inner, max_size=3),
            "allOf": st.lists(inner, max_size=2),
            "not": inner,
            "$ref": st.sampled_from(["#", "#/$defs/a", "#/nowhere", "http://127.0.0.1:1/"]) | _text,
            "$defs": st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2),
        },
    ),
    max_leaves=5,
)
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(1, 40) | st.just(10_000_000),
    "min_tokens": st.integers(0, 40),
    "temperature": st.sampled_from([0, 1e-9, 0.001, 1, 2]) | st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(0, 1_000_000),
    "min_p": st.floats(0, 1),
    "n": st.sampled_from([1, 2, 5, 33, 128]),
    "stop": _text | st.lists(_text, max_size=17),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0, 10),
    "logit_bias": st.dictionaries(st.integers(0, 300).map(str), st.floats(-100, 100), max_size=5),
    "logprobs": st.booleans() | st.integers(0, 20),
    "top_logprobs": st.integers(0, 20),
    "ignore_eos": st.booleans(),
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}]) | schemas.map(response_format),
    "tools": st.just([]),
    "tool_choice": st.sampled_from(["none", "auto"]),
    "model": st.just("tiny-llama") | _text,
    "messages": st.lists(st.fixed_dictionaries({"role": _text, "content": _text | st.none()}), max_size=3),
    "prompt_token_ids": st.lists(st.integers(0, 400), max_size=70),
    "input": _text,
    "prompt": _text,
}
_names = st.sampled_from([*GENERATION * 8, *sorted(rules._NOT_SERVED)])
_mostly = st.sampled_from([True] * 6 + [False])


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Mostly one prompt and a few parameters within their ranges; now and then anything anywhere."""
    request: dict[str, Any] = {"prompt": "x", "max_tokens": 4}
    for name in draw(st.lists(_names, max_size=5, unique=True)):
        if name in ("messages", "prompt_token_ids", "input") and draw(_mostly):
            request.pop("prompt", None)
        legal = name in LIKELY and draw(_mostly)
        request[name] = draw(LIKELY[name] if legal else _anything)
    if not draw(_mostly):
        request[draw(_text)] = draw(_anything)
    return request
