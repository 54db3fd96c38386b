"""No parameter of a request harms an engine or its neighbours: each wrong one by name, then whatever comes to mind.

The same examples every run. Others, and more of them: ``--hypothesis-profile=long``, and ``--hypothesis-seed=N``.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from contract import settings as contract_settings
from contract.errors import HeadraceError, InvalidRequest, TransientError
from contract.messages import Request, dump_output
from gpu_workers.engine import Completion
from gpu_workers.engines import rules
from tests.acceptance.harness import free_port
from tests.integration import any_request
from tests.integration.engine_rig import Answer, Rig, parse

_VLLM = pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)])
_CONTEXT = 64
_PROBE_S = 10.0
_LONGEST_S = 5.0
"""No request may keep ``prepare`` from the others for this long, nor its neighbours from their answers."""
_NEIGHBOUR = {"prompt": "an ordinary one", "seed": 5, "max_tokens": 12}
_SCHEMA_NEIGHBOUR = {"prompt": "as JSON", "seed": 5, "max_tokens": 12, "response_format": {"type": "json_object"}}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["simulated", "http", _VLLM])
async def rig(request: pytest.FixtureRequest, model_path: Path) -> AsyncIterator[Rig]:
    """A started engine with a short context, shared by the tests of this module."""
    engine = {
        "kind": request.param,
        "http_url": f"http://127.0.0.1:{free_port()}/v1",
        "model_path": str(model_path),
        "max_model_len": _CONTEXT,
        "max_requests": 32,
        "simulated_step_ms": 0.1,
        "simulated_step_ms_per_request": 0,
    }
    one = Rig(contract_settings.build({"engine": engine}))
    await one.start()
    yield one
    await one.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(rig: Rig) -> list[Any]:
    """What the two neighbours are answered when nothing is wrong."""
    return [_choices(one) for one in await rig.ask(parse(**_NEIGHBOUR), parse(**_SCHEMA_NEIGHBOUR))]


def _choices(answer: Answer) -> list[dict[str, Any]]:
    assert isinstance(answer, Completion), answer
    assert answer.choices is not None, answer.error
    return answer.choices


def _named(answer: Answer) -> InvalidRequest:
    """The refusal, which an endpoint may give after the hand-over. It speaks to a person about one field."""
    refusal = answer.error if isinstance(answer, Completion) else answer
    assert isinstance(refusal, InvalidRequest), refusal
    assert refusal.param, refusal
    field = refusal.param.split("[")[0].split(".")[0]
    assert field in refusal.message or len(refusal.message) > 20, refusal.message
    return refusal


async def _ask(rig: Rig, *requests: Request | InvalidRequest) -> list[Answer]:
    """What becomes of the requests; an engine that falls silent is ended, so that the next test finds another."""
    if rig.deaths or not rig.up:
        await rig.start()
    try:
        started = time.monotonic()
        answers = await rig.ask(*requests)
        assert time.monotonic() - started < 4 * _LONGEST_S
        await rig.engine.probe(_PROBE_S)
    except BaseException:
        await rig.stop(_PROBE_S)
        raise
    return answers


# -- by name ------------------------------------------------------------------------------------------------------

_WRONG: list[dict[str, Any]] = [
    {"id": 7},
    {"max_tokens": 4.0},
    {"max_tokens": 4.5},
    {"max_tokens": True},
    {"max_tokens": "4"},
    {"max_tokens": [4]},
    {"max_tokens": 0},
    {"max_tokens": -1},
    {"max_tokens": 2**31},
    {"max_tokens": 2**63},
    {"max_tokens": 2**70},
    {"min_tokens": 1.5},
    {"min_tokens": True},
    {"min_tokens": -1},
    {"min_tokens": 2**64},
    {"min_tokens": 9, "max_tokens": 3},
    {"temperature": True},
    {"temperature": "0.5"},
    {"temperature": -0.5},
    {"temperature": 1e308},
    {"top_p": 0},
    {"top_p": 1.1},
    {"top_p": "1"},
    {"top_k": 5.0},
    {"top_k": -1},
    {"top_k": 2**40},
    {"min_p": -0.1},
    {"min_p": True},
    {"n": 2.0},
    {"n": 0},
    {"n": True},
    {"n": 2**33},
    {"n": 2, "temperature": 0},
    {"stop": [1]},
    {"stop": [""]},
    {"stop": ["x"] * 17},
    {"stop": {"x": 1}},
    {"seed": "a"},
    {"seed": 1.5},
    {"seed": True},
    {"seed": 2**63},
    {"seed": -(2**70)},
    {"presence_penalty": "1"},
    {"presence_penalty": 1e9},
    {"frequency_penalty": True},
    {"repetition_penalty": 0},
    {"repetition_penalty": [1]},
    {"ignore_eos": 1},
    {"ignore_eos": "yes"},
    {"logit_bias": {"5": "1"}},
    {"logit_bias": {"5": True}},
    {"logit_bias": {"5": 1e9}},
    {"logit_bias": {"-1": 1}},
    {"logit_bias": {"999999999999": 1}},
    {"logit_bias": {"1.0": 1}},
    {"logit_bias": [5]},
    {"logprobs": 2.0},
    {"logprobs": -1},
    {"logprobs": 21},
    {"logprobs": 2**70},
    {"logprobs": True, "top_logprobs": 21},
    {"top_logprobs": 2},
    {"response_format": "json"},
    {"response_format": {"type": "yaml"}},
    {"response_format": {"type": 5}},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": "object"}}},
    {"tools": [{"type": "function"}]},
    {"tools": "all"},
    {"tool_choice": "required"},
    {"tool_choice": 5},
    {"model": "no-such-model"},
    {"model": "tiny-llama:an-adapter-nobody-loaded"},
    {"model": ["tiny-llama"]},
    {"prompt": 5},
    {"prompt": ["a", "b"]},
    {"prompt": ""},
    {"prompt": None, "prompt_token_ids": []},
    {"prompt": None, "prompt_token_ids": [1.0]},
    {"prompt": None, "prompt_token_ids": [True]},
    {"prompt": None, "prompt_token_ids": ["5"]},
    {"prompt": None, "prompt_token_ids": [-1]},
    {"prompt": None, "prompt_token_ids": [2**31]},
    {"prompt": None, "prompt_token_ids": [2**64]},
    {"prompt": None, "prompt_token_ids": [10**12]},
    {"prompt": None, "prompt_token_ids": [10] * _CONTEXT},
    {"prompt": None, "messages": []},
    {"prompt": None, "messages": [{"role": "user", "content": 5}]},
    {"prompt": None, "messages": [{"role": 5, "content": "x"}]},
    {"prompt": None, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    {"prompt": None, "messages": ["hello"]},
    # Known to vLLM's or OpenAI's servers, not to us: rightly or wrongly typed, they are not passed over in silence.
    {"max_completion_tokens": 5},
    {"skip_special_tokens": "no"},
    {"skip_special_tokens": False},
    {"bad_words": [1]},
    {"bad_words": ["x"]},
    {"cache_salt": 5},
    {"priority": 5.5},
    {"priority": "hi"},
    {"priority": True},
    {"request_id": 7},
    {"lora_request": {"lora_name": "a", "lora_int_id": 1, "lora_path": "/nowhere"}},
    {"structured_outputs": {"regex": "("}},
    {"guided_json": {"type": "object"}},
    {"stop_token_ids": [2**70]},
    {"allowed_token_ids": [-1]},
    {"prompt_logprobs": 2.0},
    {"stream": True},
    {"best_of": 3},
]


async def test_each_wrong_parameter_is_refused_by_its_name_beside_an_ordinary_neighbour(
    rig: Rig, expected: list[Any]
) -> None:
    for fields in _WRONG:
        wrong, beside = await rig.ask(parse(**({"prompt": "x", "max_tokens": 3} | fields)), parse(**_NEIGHBOUR))
        refusal = _named(wrong)
        assert (refusal.param or "").split("[")[0].split(".")[0] in fields, (fields, refusal.param)
        assert _choices(beside) == expected[0], fields
    await rig.engine.probe(_PROBE_S)


async def test_parameter_of_other_servers_that_asks_for_nothing_is_passed_over(rig: Rig) -> None:
    for name, neutrals in rules._NOT_SERVED.items():
        for neutral in neutrals:
            (answer,) = await rig.ask(parse(prompt="x", max_tokens=3, **{name: neutral}))
            assert isinstance(answer, Completion), (name, neutral, answer)
            assert answer.error is None


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"anyOf": [schema, {"type": "array", "items": schema}]}
    return schema


def _deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


# Each kept vLLM's own choice of a compiler busy for 7 s to minutes, or turned another sender's schema away.
_HOSTILE: dict[str, Any] = {
    "a compiler of its own": {"type": "object", "patternProperties": {"^(": {"type": "integer"}}},
    "another compiler": {"type": "integer", "multipleOf": 7},
    "many words": {"enum": [f"word {number}" for number in range(4_000)]},
    "too many words": {"enum": [f"word {number}" for number in range(50_000)]},
    "long pattern": {"type": "string", "pattern": "a?" * 20_000},
    "nested counts": {"type": "string", "pattern": "(((a{1,100}){1,100}){1,100}){1,100}"},
    "large count": {"type": "string", "pattern": "a{1000000000}"},
    "open brackets": {"type": "string", "pattern": "(" * 5_000 + "a" + ")" * 5_000},
    "NUL": {"type": "string", "pattern": "\0"},
    "at least 10^8": {"type": "array", "items": {"type": "integer"}, "minItems": 10**8},
    "at most 10^5": {"type": "array", "items": {"type": "integer"}, "maxItems": 10**5},
    "counts of a float": {"type": "array", "items": {}, "minItems": 1e300},
    "10,000 items of 10,000": {"type": "array", "maxItems": 10**4, "items": {"type": "array", "maxItems": 10**4}},
    "long text": {"type": "string", "minLength": 10**9},
    "choices of choices": _nested(9),
    "choices of choices of choices": _nested(13),
    "deep": _deep(200),
    "too deep to write": _deep(400),
    "wide": {"type": "object", "properties": {f"p{number}": {"type": "integer"} for number in range(1_000)}},
    "itself": {"$ref": "#"},
    "a ring": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "a file": {"$ref": "file:///etc/hostname"},
    "a tree": {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"l": {"$ref": "#/$defs/n"}}}}},
    "look-behind": {"type": "string", "pattern": "(?<=a)b"},
    "no choice": {"type": "string", "enum": []},
    "beyond 64 bit": {"type": "integer", "minimum": -(10**18), "maximum": 10**18},
    "impossible": {"type": "array", "items": False, "minItems": 1},
    "not JSON schema": {"type": 5, "properties": [1], "required": None},
}


async def test_no_schema_keeps_its_neighbours_waiting_or_decides_how_theirs_are_read(
    rig: Rig, expected: list[Any]
) -> None:
    neighbours = [parse(**_NEIGHBOUR), parse(**_SCHEMA_NEIGHBOUR)]
    for name, schema in _HOSTILE.items():
        wanted = parse(prompt="as JSON", seed=1, max_tokens=20, response_format=any_request.response_format(schema))
        started = time.monotonic()
        hostile, *beside = await _ask(rig, wanted, *neighbours)
        took_s = time.monotonic() - started
        assert took_s < _LONGEST_S, (name, took_s)
        assert [_choices(one) for one in beside] == expected, name
        if isinstance(hostile, InvalidRequest) or hostile.error is not None:
            assert _named(hostile).param == "response_format", name


# -- whatever comes to mind ---------------------------------------------------------------------------------------


def _check(request: dict[str, Any], answer: Answer) -> None:
    """Answered in JSON within its limits, or an error that a person can read."""
    error: HeadraceError | None = answer.error if isinstance(answer, Completion) else answer
    if error is not None:
        assert isinstance(error, (InvalidRequest, TransientError)), (request, error)
        assert error.code, request
        assert len(error.message) > 5, request
        return
    assert isinstance(answer, Completion)
    assert answer.choices is not None, request
    assert len(answer.choices) == request.get("n", 1), request
    assert 0 <= answer.usage.output_tokens <= _CONTEXT * len(answer.choices), request
    json.loads(dump_output({"choices": answer.choices})[0], parse_constant=lambda name: pytest.fail(f"{name} in JSON"))


async def test_every_generation_parameter_is_fuzzed_also_within_its_range() -> None:
    assert set(any_request.GENERATION) == set(any_request.LIKELY)


@settings(
    max_examples=settings().max_examples * 3 // 10,
    derandomize=settings.get_current_profile_name() == "headrace",
    phases=[Phase.explicit, Phase.generate],  # a smaller example would cost an engine each time
    suppress_health_check=list(HealthCheck),
)
@given(
    batch=st.lists(any_request.requests(), min_size=12, max_size=12),
    schemas=st.lists(any_request.schemas, min_size=3, max_size=3),
)
async def test_no_request_whatever_makes_the_engine_deaf_or_changes_its_neighbours(
    rig: Rig, expected: list[Any], batch: list[dict[str, Any]], schemas: list[Any]
) -> None:
    batch += [
        {"prompt": "as JSON", "max_tokens": 6, "response_format": any_request.response_format(schema)}
        for schema in schemas
    ]
    *answers, one, other = await _ask(rig, *[parse(**request) for request in [*batch, _NEIGHBOUR, _SCHEMA_NEIGHBOUR]])
    for request, answer in zip(batch, answers, strict=True):
        _check(request, answer)
    assert [_choices(one), _choices(other)] == expected
