"""One conformance suite for every engine, so that the simulated one cannot lie about the real one.

The vLLM half is marked ``vllm`` and shares one engine; what kills it comes last.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio

from contract import settings as contract_settings
from contract.errors import EngineDied, FatalError, InvalidRequest, TransientError
from contract.messages import Request
from contract.settings import Settings
from gpu_workers import engines
from gpu_workers.engine import Completion
from tests.acceptance.harness import free_port
from tests.integration.engine_rig import Rig, alive, parse

_VLLM = pytest.param(
    "vllm",
    marks=[
        pytest.mark.vllm,
        pytest.mark.filterwarnings("ignore"),  # vLLM's imports, hundreds of modules, warn as they like
        pytest.mark.timeout(600),
    ],
)
_CONTEXT = 256

pytestmark = pytest.mark.asyncio(loop_scope="module")


def _settings(kind: str, model: Path | str, **engine: Any) -> Settings:
    section = {
        "http_url": f"http://127.0.0.1:{free_port()}/v1",
        "kind": kind,
        "model_path": str(model),
        "max_model_len": _CONTEXT,
        "max_requests": 32,
        "simulated_prefill_tokens_per_s": 1_000_000,
        "simulated_step_ms": 2,
        "simulated_step_ms_per_request": 0.02,
        "simulated_faults": True,
    }
    return contract_settings.build({"engine": section | engine})


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["simulated", "http", _VLLM])
async def rig(request: pytest.FixtureRequest, model_path: Path) -> AsyncIterator[Rig]:
    """A started engine, shared by the tests of this module."""
    one = Rig(_settings(request.param, model_path))
    await one.start()
    yield one
    await one.close()


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def _alive_before_and_nothing_twice(rig: Rig) -> AsyncIterator[None]:
    if rig.deaths or not rig.up:  # a test before this one failed half-way
        await rig.start()
    yield
    assert rig.twice == [], "jobs named twice by the engine"


def _text(completion: Completion, index: int = 0) -> str:
    assert completion.choices is not None
    choice = completion.choices[index]
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


def _refusal(rig: Rig, answer: Any) -> InvalidRequest:
    """Of a request that is refused: by our engines before the hand-over, over HTTP perhaps by the endpoint."""
    if rig.kind == "http" and isinstance(answer, Completion):
        answer = answer.error
    assert isinstance(answer, InvalidRequest)
    return answer


def _finish(completion: Completion, index: int = 0) -> str:
    assert completion.choices is not None
    reason: str = completion.choices[index]["finish_reason"]
    return reason


# -- answers ------------------------------------------------------------------------------------------


async def test_started_engine_says_what_it_holds(rig: Rig) -> None:
    assert rig.info is not None
    assert (rig.info.model, rig.info.max_requests, rig.info.max_model_len) == (rig.model, 32, _CONTEXT)
    assert rig.info.kv_tokens >= _CONTEXT
    assert all(map(alive, rig.info.pids))
    assert bool(rig.info.pids) == (rig.kind == "vllm")


async def test_each_job_is_answered_once_by_its_id_in_any_order(rig: Rig) -> None:
    lengths = [random.Random(number).randint(1, 60) for number in range(32)]
    requests = [
        Request(prompt=f"job {number}", max_tokens=length, ignore_eos=True, temperature=0.0)
        for number, length in enumerate(lengths)
    ]
    completions = await rig.wait(rig.submit(*requests))
    assert [completion.usage.output_tokens for completion in completions] == lengths
    assert {_finish(completion) for completion in completions} == {"length"}


async def test_chat_requests_get_a_message_and_others_a_text(rig: Rig) -> None:
    chat: list[dict[str, Any]] = [
        {"input": "hello"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]},
    ]
    for form in chat:
        answer = await rig.ask_one(**form, max_tokens=4)
        assert answer.choices is not None
        assert answer.choices[0]["message"]["role"] == "assistant"
    for form in ({"prompt": "hello"}, {"prompt_token_ids": [10, 20, 30]}):
        answer = await rig.ask_one(**form, max_tokens=4)
        assert answer.choices is not None
        assert isinstance(answer.choices[0]["text"], str)
    assert (await rig.ask_one(prompt_token_ids=[10, 20, 30], max_tokens=4)).usage.prompt_tokens == 3


async def test_input_is_one_user_message(rig: Rig) -> None:
    short: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
    one = await rig.ask_one(input="same question", **short)
    other = await rig.ask_one(messages=[{"role": "user", "content": "same question"}], **short)
    assert (_text(one), one.usage.prompt_tokens) == (_text(other), other.usage.prompt_tokens)


async def test_choices_are_indexed_differ_and_are_all_counted(rig: Rig) -> None:
    answer = await rig.ask_one(prompt="many", n=5, seed=7, max_tokens=20, ignore_eos=True)
    assert answer.choices is not None
    assert [choice["index"] for choice in answer.choices] == [0, 1, 2, 3, 4]
    assert len({choice["text"] for choice in answer.choices}) == 5
    assert answer.usage.output_tokens == 100
    again = await rig.ask_one(prompt="many", n=5, seed=7, max_tokens=20, ignore_eos=True)
    assert again.choices == answer.choices


async def test_stop_string_ends_the_answer_and_is_not_part_of_it(rig: Rig) -> None:
    fields = {"prompt": "tell me all", "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    whole = _text(await rig.ask_one(**fields))
    stop = whole[len(whole) // 2 :][:2]
    cut = await rig.ask_one(**fields, stop=["never comes", stop])
    assert _text(cut) == whole[: whole.find(stop)]
    assert _finish(cut) == "stop"
    assert cut.usage.output_tokens < 40


async def test_seed_gives_the_same_answer_alone_and_in_a_crowd(rig: Rig) -> None:
    mine = Request(prompt="what is it", seed=11, max_tokens=30)
    (alone,) = await rig.wait(rig.submit(mine))
    crowd = [Request(prompt=f"noise {number}", seed=number, max_tokens=40) for number in range(20)]
    ids = rig.submit(*crowd[:10], mine, *crowd[10:])
    in_crowd = (await rig.wait(ids))[10]
    assert _text(alone) == _text(in_crowd)
    assert _text(await rig.ask_one(prompt="what is it", seed=12, max_tokens=30)) != _text(alone)


async def test_seeded_prompts_larger_together_than_one_step_are_all_answered(rig: Rig) -> None:
    # Computed in pieces they kill vLLM's core on the CPU; see docs/decisions.
    ids = [20 + number % 50 for number in range(200)]
    requests = [Request(prompt_token_ids=[number + 10, *ids], seed=number, max_tokens=4) for number in range(32)]
    for completion in await rig.wait(rig.submit(*requests)):
        assert completion.error is None


async def test_min_tokens_holds_the_end_back(rig: Rig) -> None:
    answers = await rig.ask(*[parse(prompt=f"p{seed}", seed=seed, min_tokens=30, max_tokens=60) for seed in range(8)])
    for answer in answers:
        assert isinstance(answer, Completion)
        assert 30 <= answer.usage.output_tokens <= 60


@pytest.mark.parametrize("logprobs", [{"logprobs": True, "top_logprobs": 3}, {"logprobs": True}, {"logprobs": 3}])
@pytest.mark.parametrize("form", [{"input": "likely?"}, {"prompt": "likely?"}])
async def test_log_probabilities_have_openais_shape_and_strict_json(
    rig: Rig, form: dict[str, Any], logprobs: dict[str, Any]
) -> None:
    answer = await rig.ask_one(**form, **logprobs, max_tokens=6, min_tokens=6, temperature=0.5)
    assert answer.choices is not None
    found = answer.choices[0]["logprobs"]
    strict = json.loads(orjson.dumps(found), parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    alternatives = 0 if logprobs == {"logprobs": True} else 3
    if "input" in form:
        assert len(strict["content"]) == 6
        for entry in strict["content"]:
            assert len(entry["top_logprobs"]) == alternatives
            assert math.isfinite(entry["logprob"])
            assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
    else:
        assert {len(column) for column in strict.values()} == {6}
        assert set(strict) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}


async def test_json_object_is_a_json_object(rig: Rig) -> None:
    asked = [
        parse(prompt="as JSON", response_format={"type": "json_object"}, seed=seed, max_tokens=120) for seed in range(8)
    ]
    whole = [answer for answer in await rig.ask(*asked) if isinstance(answer, Completion) and _finish(answer) == "stop"]
    assert whole, "none of 8 came to its end"
    for answer in whole:
        assert isinstance(json.loads(_text(answer), strict=False), dict)


async def test_schema_is_followed_or_refused_by_name(rig: Rig) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    (answer,) = await rig.ask(parse(prompt="as JSON", response_format=wanted, seed=1, max_tokens=200))
    if isinstance(answer, InvalidRequest):
        assert (rig.kind, answer.param) == ("simulated", "response_format")
    elif rig.kind == "http":
        assert _refusal(rig, answer).param == "response_format"
    elif _finish(answer) == "stop":
        assert isinstance(json.loads(_text(answer), strict=False)["a"], bool)
    # The last passes every check in front; only the core, when it compiles it, finds out.
    for broken in ({"type": "nonsense"}, {"type": "string", "pattern": "(["}, {"type": "string", "pattern": "\0"}):
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": broken}}
        (answer,) = await rig.ask(parse(prompt="as JSON", response_format=wanted, max_tokens=20))
        refusal = answer if isinstance(answer, InvalidRequest) else answer.error
        assert isinstance(refusal, InvalidRequest)
        assert refusal.param == "response_format"


# -- refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"prompt": "x", "model": "no-such-model"}, "model_not_found", "model"),
        ({"prompt": "x", "tools": [{"type": "function"}]}, "unsupported_parameter", "tools"),
        ({"prompt": ""}, "empty_prompt", "prompt"),
        ({"prompt_token_ids": []}, "empty_prompt", "prompt_token_ids"),
        ({"prompt_token_ids": [5, 10**6]}, "invalid_request", "prompt_token_ids"),
        ({"prompt_token_ids": [-5]}, "invalid_request", "prompt_token_ids"),
        ({"prompt_token_ids": [10] * _CONTEXT}, "context_length_exceeded", "prompt_token_ids"),
        ({"prompt": "long " * 2_000}, "context_length_exceeded", "prompt"),
        ({"input": "long " * 2_000}, "context_length_exceeded", "input"),
        ({"messages": [{"role": "user", "content": 5}]}, "invalid_request", "messages[0].content"),
        ({"prompt": "x", "n": 2, "temperature": 0}, "invalid_request", "n"),
        ({"prompt": "x", "min_tokens": 9, "max_tokens": 3}, "invalid_request", "min_tokens"),
        ({"prompt": "x", "logit_bias": {"900000": 1}}, "invalid_request", "logit_bias"),
        ({"prompt": "x", "logit_bias": {"word": 1}}, "invalid_request", "logit_bias"),
        ({"prompt": "x", "top_logprobs": 2}, "invalid_request", "top_logprobs"),
        ({"prompt": "x", "response_format": {"type": "xml"}}, "unsupported_parameter", "response_format"),
    ],
)
async def test_wrong_request_is_refused_before_the_engine_with_the_field_named(
    rig: Rig, fields: dict[str, Any], code: str, param: str
) -> None:
    (answer,) = await rig.ask(parse(**fields))
    refusal = _refusal(rig, answer)
    assert (refusal.code, refusal.param) == (code, param)


async def test_refusal_for_length_names_the_tokens_and_the_limit(rig: Rig) -> None:
    (refusal,) = await rig.ask(parse(prompt_token_ids=[10] * 300))
    assert isinstance(refusal, InvalidRequest)
    assert "300" in refusal.message
    assert str(_CONTEXT) in refusal.message


async def test_b17_bad_prompts_do_not_spoil_their_batch(rig: Rig) -> None:
    batch = {
        "short": Request(prompt="short", max_tokens=5),
        "over": Request(prompt_token_ids=[10] * (_CONTEXT + 1)),
        "exactly": Request(prompt_token_ids=[10] * _CONTEXT),
        "last": Request(prompt_token_ids=[10] * (_CONTEXT - 1), max_tokens=50, ignore_eos=True),
        "empty": Request(prompt=""),
        "also short": Request(prompt="also short", max_tokens=5),
    }
    for round_number in range(6):
        names = list(batch)
        random.Random(round_number).shuffle(names)
        answers = dict(zip(names, await rig.ask(*[batch[name] for name in names]), strict=True))
        assert answers.keys() == batch.keys()
        for name in ("over", "exactly"):
            refusal = answers[name]
            assert isinstance(refusal, InvalidRequest)
            assert refusal.code == "context_length_exceeded"
        assert isinstance(answers["empty"], InvalidRequest)
        for name in ("short", "also short"):
            answer = answers[name]
            assert isinstance(answer, Completion)
            assert answer.error is None
            assert 0 < answer.usage.output_tokens <= 5
        last = answers["last"]
        assert isinstance(last, Completion)
        assert (last.usage.output_tokens, _finish(last)) == (1, "length")


async def test_one_untokenisable_prompt_is_refused_alone(rig: Rig) -> None:
    good, bad = Request(prompt="good", max_tokens=3), Request(prompt="half a pair \ud83d", max_tokens=3)
    before, middle, after = await rig.ask(good, bad, good)
    assert isinstance(before, Completion)
    assert isinstance(after, Completion)
    if rig.kind == "vllm":
        assert isinstance(middle, InvalidRequest)
        assert middle.param == "prompt"


# Each of these, given to vLLM as it is, makes its core deaf or kills it.
_KILLERS: list[dict[str, Any]] = [
    {"max_tokens": 4.0},
    {"max_tokens": 4.5},
    {"max_tokens": True},
    {"max_tokens": "4"},
    {"max_tokens": 2**70},
    {"temperature": True},
    {"temperature": "0.5"},
    {"seed": "a"},
    {"seed": 1.5},
    {"seed": 2**70},
    {"min_tokens": 1.5},
    {"ignore_eos": 1},
    {"n": 2.0},
    {"top_k": 5.0},
    {"logprobs": 2.0},
    {"stop": [1]},
    {"stop": [""]},
    {"logit_bias": {"5": "1"}},
    {"logit_bias": {"-1": 1}},
    {"logit_bias": {"999999999": 1}},
    {"prompt": None, "prompt_token_ids": [1.0]},
    {"prompt": None, "prompt_token_ids": [True]},
    {"prompt": None, "prompt_token_ids": [2**70]},
    {"prompt": None, "prompt_token_ids": [10**9]},
]

# Legal to the last digit, and each at the end of its range.
_EXTREMES: list[dict[str, Any]] = [
    {"temperature": 1e-9},
    {"temperature": 0.001},
    {"temperature": 2},
    {"top_p": 1e-300},
    {"min_p": 1},
    {"top_k": 1_000_000},
    {"top_k": 1, "top_p": 1e-9, "min_p": 1e-9},
    {"repetition_penalty": 1e-300},
    {"repetition_penalty": 10},
    {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 0.01},
    {"seed": 2**63 - 1, "n": 3},
    {"seed": -(2**63), "n": 2},
    {"seed": -1},
    {"n": 24, "seed": 1, "max_tokens": 2},
    {"logit_bias": {str(number): -100 for number in range(283)}},
    {"logit_bias": {"5": 100, "6": -100}, "logprobs": 20},
    {"stop": [f"word {number}" for number in range(16)]},
    {"stop": "x" * 50_000},
    {"logprobs": 20},
    {"min_tokens": 200, "max_tokens": 200},
    {"max_tokens": 10_000_000, "ignore_eos": True},
    {"prompt": "\0 a NUL and \U0001f600 a face"},
    {"prompt": None, "messages": [{"role": "a role of its own", "content": "x", "name": 5, "tool_calls": [{}]}]},
    {"prompt": None, "messages": [{"role": "assistant"}]},
    {"extra_field": {"deep": [1.0, True]}, "user": 5, "metadata": "high", "priority": 0, "bad_words": None},
]


async def test_no_parameter_of_a_request_can_make_the_engine_deaf(rig: Rig) -> None:
    for fields in _KILLERS:
        (answer,) = await rig.ask(parse(**({"prompt": "x", "max_tokens": 3} | fields)))
        assert _refusal(rig, answer), fields
    await rig.engine.probe(10)
    assert (await rig.ask_one(prompt="still there?", max_tokens=3)).usage.output_tokens > 0


async def test_every_legal_extreme_is_answered_beside_ordinary_neighbours(rig: Rig) -> None:
    neighbour = parse(prompt="an ordinary one", seed=5, max_tokens=20)
    expected = _text(await rig.ask_one(prompt="an ordinary one", seed=5, max_tokens=20))
    for fields in _EXTREMES:
        extreme, beside = await rig.ask(parse(**({"prompt": "x", "max_tokens": 5} | fields)), neighbour)
        assert isinstance(extreme, Completion), (fields, extreme)
        assert extreme.error is None, fields
        orjson.dumps(extreme.choices)
        assert isinstance(beside, Completion)
        assert _text(beside) == expected, fields
    await rig.engine.probe(10)


async def test_what_vllms_exceptions_mean_for_the_request(rig: Rig) -> None:
    if rig.kind != "vllm":
        pytest.skip("the simulated engine raises nothing")
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.exceptions import EngineGenerateError

    from gpu_workers.engines.vllm_output import refusal

    wrong = refusal(VLLMValidationError("too much", parameter="max_tokens", value=5))
    assert isinstance(wrong, InvalidRequest)
    assert wrong.param == "max_tokens"
    for cause in (TypeError("x"), OverflowError("x"), UnicodeEncodeError("utf-8", "\ud83d", 0, 1, "x")):
        error = EngineGenerateError()
        error.__cause__ = cause
        assert isinstance(refusal(error), InvalidRequest)
    error = EngineGenerateError()
    error.__cause__ = RuntimeError("cuda")
    assert isinstance(refusal(error), TransientError)
    assert isinstance(refusal(EngineGenerateError()), TransientError)


# -- cancelling ---------------------------------------------------------------------------------------


async def test_cancelled_job_ends_with_its_part_and_the_others_go_on(rig: Rig) -> None:
    long = Request(prompt="on and on", max_tokens=240, ignore_eos=True)
    doomed, choir, spared = rig.submit(long, Request(prompt="us", n=2, max_tokens=240, ignore_eos=True), long)
    await rig.until(lambda: rig.engine.stats().running == 4)
    rig.engine.cancel([doomed, choir, 10**9])
    cut, cut_choir, whole = await rig.wait([doomed, choir, spared])
    assert cut.cancelled
    assert cut_choir.cancelled
    if rig.kind != "http":  # an endpoint does not say how far it came
        assert 0 < cut.usage.output_tokens < 240
    assert _finish(cut) == "abort"
    assert cut_choir.choices is not None
    assert len(cut_choir.choices) == 2
    assert (whole.cancelled, whole.usage.output_tokens) == (False, 240)
    rig.engine.cancel([doomed, spared])


async def test_job_cancelled_in_the_turn_of_its_submission_ends_once(rig: Rig) -> None:
    (job_id,) = rig.submit(Request(prompt="never mind", max_tokens=200, ignore_eos=True))
    rig.engine.cancel([job_id])
    (completion,) = await rig.wait([job_id])
    assert completion.cancelled
    assert completion.error is None


async def test_ctrl_c_in_the_terminal_does_not_reach_the_core(rig: Rig) -> None:
    if rig.kind != "vllm":
        pytest.skip("the simulated engine has no process")
    (job_id,) = rig.submit(Request(prompt="on and on", max_tokens=100, ignore_eos=True))
    rig._signal(signal.SIGINT)
    (completion,) = await rig.wait([job_id])
    assert completion.usage.output_tokens == 100
    await rig.engine.probe(10)


# -- death, last --------------------------------------------------------------------------------------


async def test_stats_come_back_to_nothing(rig: Rig) -> None:
    await rig.ask_one(prompt="the last", max_tokens=1)
    await rig.until(lambda: rig.engine.stats().running == 0)
    assert rig.engine.stats().waiting == 0
    assert rig.engine.stats().kv_usage < 0.1


async def test_killed_core_is_told_once_and_a_new_start_answers(rig: Rig) -> None:
    ids = rig.submit(*[Request(prompt=f"{number}", max_tokens=250, ignore_eos=True) for number in range(32)])
    await rig.until(lambda: rig.engine.stats().running == len(ids))
    rig.kill()
    await rig.wait_for_death(5)
    heard = len(rig.heard)
    rig.engine.submit([])
    with pytest.raises(EngineDied):
        await rig.engine.probe(5)
    prepared = rig.engine.prepare([Request(prompt="while it is dead", max_tokens=4)])
    assert not isinstance(prepared[0], InvalidRequest)
    await asyncio.sleep(0.3)
    assert len(rig.deaths) == 1
    assert len(rig.heard) == heard, "a completion after the death"
    assert not rig.heard.keys() & set(ids), "nothing was complete"
    dead = rig.info.pids if rig.info else ()
    await rig.start()
    assert not any(map(alive, dead))
    assert (await rig.ask_one(prompt="back again", max_tokens=4)).usage.output_tokens > 0


async def test_core_told_to_shut_down_by_others_counts_as_dead_not_as_failed_requests(rig: Rig) -> None:
    if rig.kind != "vllm":
        pytest.skip("the simulated engine has no process")
    ids = rig.submit(*[Request(prompt=f"{number}", max_tokens=250, ignore_eos=True) for number in range(8)])
    await rig.until(lambda: rig.engine.stats().running == len(ids))
    rig._signal(signal.SIGTERM)
    await rig.wait_for_death(10)
    assert not rig.heard.keys() & set(ids), "vLLM's aborts must not look like answers or failures"
    await rig.start()
    await rig.ask_one(prompt="back again", max_tokens=4)


async def test_frozen_core_is_found_by_the_probe_and_can_be_replaced(rig: Rig) -> None:
    await rig.engine.probe(10)
    rig.freeze()
    began = time.monotonic()
    with pytest.raises(EngineDied):
        await rig.engine.probe(0.5)
    assert time.monotonic() - began < 3
    frozen = rig.info.pids if rig.info else ()
    await rig.stop(10)
    assert time.monotonic() - began < 8, "a deaf core is not asked politely"
    assert not any(map(alive, frozen))
    await rig.start()
    await rig.ask_one(prompt="back again", max_tokens=4)


async def test_stop_ends_every_process_drops_jobs_silently_and_may_be_repeated(rig: Rig) -> None:
    ids = rig.submit(*[Request(prompt=f"{number}", max_tokens=250, ignore_eos=True) for number in range(8)])
    processes = rig.info.pids if rig.info else ()
    await rig.stop(10)
    assert not any(map(alive, processes))
    await rig.stop(10)
    assert not rig.heard.keys() & set(ids)
    assert rig.deaths == []
    with pytest.raises(EngineDied):
        await rig.engine.probe(1)
    rig.engine.cancel(ids)
    assert rig.engine.stats().running == 0


async def test_start_that_is_given_up_leaves_no_process_and_a_later_one_works(rig: Rig) -> None:
    await rig.stop(10)
    starting = asyncio.create_task(rig.start())
    await asyncio.sleep(0.5)
    starting.cancel()
    await asyncio.wait([starting])
    await rig.stop(30)
    assert _cores() == []
    await rig.start()
    await rig.ask_one(prompt="and yet it starts", max_tokens=4)


async def test_model_that_is_not_there_is_a_fatal_error_with_its_path(rig: Rig, tmp_path: Path) -> None:
    if rig.kind != "vllm":
        pytest.skip("the simulated engine needs no model")
    for path in (str(tmp_path), ""):
        engine = engines.create(_settings("vllm", path))
        with pytest.raises(FatalError, match=r"engine\.model_path"):
            await engine.start(rig)
        await engine.stop(5)
    odd = engines.create(_settings("vllm", tmp_path, vllm={"no_such_argument": 1}))
    with pytest.raises(FatalError, match="no_such_argument"):
        await odd.start(rig)


async def test_full_kv_cache_preempts_and_every_seeded_request_is_answered_in_full(rig: Rig, model_path: Path) -> None:
    requests = [
        Request(prompt_token_ids=[10 + number] * 100, seed=number, max_tokens=150, ignore_eos=True)
        for number in range(16)
    ]
    expected = [_text(one) for one in await rig.wait(rig.submit(*requests))]
    await rig.stop(10)
    small = {"kv_tokens": 1_024, "vllm": {"num_gpu_blocks_override": 9}}
    tight = Rig(_settings(rig.kind, model_path, **small))
    await tight.start()
    try:
        assert tight.info is not None
        assert tight.info.kv_tokens < 16 * 250
        answers = await tight.wait(tight.submit(*requests))
        assert [answer.usage.output_tokens for answer in answers] == [150] * 16
        assert [_text(answer) for answer in answers] == expected
        if rig.kind != "http":
            assert tight.engine.stats().preemptions > 0
    finally:
        await tight.close()
        await rig.start()


_ORPHAN = """
import asyncio, json, sys
from contract import settings
from gpu_workers import engines, guard
async def main():
    guard.protect("orphan-test")
    engine = engines.create(settings.build({"engine": json.loads(sys.argv[1])}))
    info = await engine.start(None)
    print(*info.pids, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_core_ends_within_two_seconds_of_a_kill_9_of_its_worker(rig: Rig, model_path: Path) -> None:
    if rig.kind != "vllm":
        pytest.skip("the simulated engine has no process")
    engine = {"kind": "vllm", "model_path": str(model_path), "max_model_len": _CONTEXT}
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _ORPHAN, json.dumps(engine), stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    try:
        assert worker.stdout is not None
        processes = [int(pid) for pid in (await worker.stdout.readline()).split()]
        assert processes
        assert all(map(alive, processes))
    finally:
        worker.kill()
        await worker.wait()
    await rig.until(lambda: not any(map(alive, processes)), 2)


def _cores() -> list[str]:
    import multiprocessing

    return [process.name for process in multiprocessing.active_children() if process.is_alive()]
