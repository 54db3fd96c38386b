"""What the simulated engine answers: predictable from the request alone."""

from __future__ import annotations

import json
from typing import Any

import hypothesis
import orjson
import pytest
from hypothesis import strategies as st

from contract.errors import InvalidRequest
from contract.messages import LOGPROB_FLOOR, Request, dump_output
from gpu_workers.engines.simulated_plan import Plan, plan


def _plan(max_model_len: int = 1_000, **fields: Any) -> Plan:
    request = Request(**({"prompt": "a question of some length"} | fields))
    return plan(request, model="m", max_model_len=max_model_len, default_max_tokens=50, faults=True)[0]


def _text(**fields: Any) -> str:
    choices, _ = _plan(**fields).answer()
    text: str = choices[0]["text"]
    return text


def test_same_prompt_and_seed_give_the_same_answer_and_others_do_not() -> None:
    assert _text(seed=1) == _text(seed=1)
    assert len({_text(seed=seed) for seed in range(20)}) == 20
    assert len({_text(prompt=f"question {number}") for number in range(20)}) == 20


def test_temperature_zero_forgets_the_seed() -> None:
    assert _text(seed=1, temperature=0.0) == _text(seed=2, temperature=0.0)


@hypothesis.given(st.text(max_size=200), st.integers(1, 3_000))
def test_token_counts_follow_the_stated_rule(prompt: str, max_tokens: int) -> None:
    hypothesis.assume(prompt)
    planned = _plan(prompt=prompt, max_tokens=max_tokens, ignore_eos=True, max_model_len=10_000)
    choices, usage = planned.answer()
    size = len(prompt.encode("utf-8", "surrogatepass"))
    assert usage.prompt_tokens == -(-size // 4)
    assert usage.output_tokens == max_tokens
    assert len(choices[0]["text"].split()) == max_tokens, "an output token is one word"


@hypothesis.given(st.integers(0, 2**31), st.integers(1, 300))
def test_cut_answer_is_a_prefix_of_the_whole_one(seed: int, produced: int) -> None:
    planned = _plan(seed=seed, max_tokens=300, ignore_eos=True, max_model_len=10_000)
    whole, _ = planned.answer()
    cut, usage = planned.cut([produced])
    assert whole[0]["text"].startswith(cut[0]["text"])
    assert usage.output_tokens == produced
    assert cut[0]["finish_reason"] == ("abort" if produced < 300 else "length")


@hypothesis.given(st.integers(0, 2**31), st.integers(0, 30), st.integers(0, 30))
def test_stop_string_ends_the_answer_before_it_but_not_before_min_tokens(seed: int, word: int, least: int) -> None:
    whole = _text(seed=seed, max_tokens=60, ignore_eos=True)
    stop = " " + whole.split()[word + 1] + " "
    choices, usage = _plan(seed=seed, max_tokens=60, ignore_eos=True, stop=stop, min_tokens=least).answer()
    text = choices[0]["text"]
    assert whole.startswith(text)
    if choices[0]["finish_reason"] == "stop":
        assert whole[len(text) :].startswith(stop)
        assert usage.output_tokens > least
    else:
        assert text == whole


def test_json_object_is_json_unless_it_is_cut() -> None:
    for seed in range(50):
        answer = json.loads(_text(seed=seed, response_format={"type": "json_object"}, max_tokens=20))
        assert isinstance(answer, dict)
    choices, usage = _plan(response_format={"type": "json_object"}, max_tokens=2).answer()
    assert (choices[0]["finish_reason"], usage.output_tokens) == ("length", 2)


def test_choices_of_one_request_differ_and_are_counted_together() -> None:
    choices, usage = _plan(n=4, seed=3, max_tokens=10, ignore_eos=True).answer()
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in choices}) == 4
    assert usage.output_tokens == 40


@pytest.mark.parametrize("form", [{"prompt": "FAULT:logprobs x"}, {"prompt": None, "input": "FAULT:logprobs x"}])
def test_b20_log_probabilities_that_json_cannot_write_are_floored_or_null(form: dict[str, Any]) -> None:
    wanted = {"logprobs": True, "top_logprobs": 8} if form.get("input") else {"logprobs": 8}
    choices, _ = _plan(max_tokens=8, ignore_eos=True, **wanted, **form).answer()
    text = orjson.dumps(choices)
    assert b"NaN" not in text
    assert b"Infinity" not in text
    numbers: set[float | None] = set()

    def walk(value: Any, inside: bool) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(item, inside or key in ("logprob", "token_logprobs", "top_logprobs"))
        elif isinstance(value, list):
            for item in value:
                walk(item, inside)
        elif inside and not isinstance(value, str):
            numbers.add(value)

    walk(json.loads(text)[0]["logprobs"], inside=False)
    assert {LOGPROB_FLOOR, None} <= numbers
    assert all(number is None or number >= LOGPROB_FLOOR for number in numbers)


@pytest.mark.parametrize(("word", "weird"), [("nul", "\0"), ("surrogate", "\ud83d")])
def test_b14_weird_text_leaves_the_engine_untouched_and_can_be_stored(word: str, weird: str) -> None:
    choices, _ = _plan(prompt=f"FAULT:{word} x").answer()
    assert choices[0]["text"].endswith(weird)
    data, altered = dump_output({"choices": choices})
    assert altered
    assert "\ufffd" in json.loads(data)["choices"][0]["text"]


def test_fault_words_are_plain_words_unless_switched_on() -> None:
    request = Request(prompt="FAULT:die now")
    planned, _ = plan(request, model="m", max_model_len=100, default_max_tokens=9, faults=False)
    assert planned.faults is None
    assert _plan(prompt="FAULT:slow=20 FAULT:cached=3").faults == {"slow": 20, "cached": 3}
    with pytest.raises(InvalidRequest, match="no such fault"):
        _plan(prompt="FAULT:dye")


def test_cached_tokens_never_exceed_the_prompt() -> None:
    _, usage = _plan(prompt="FAULT:cached=3 and more").answer()
    assert usage.cached_tokens == 3
    _, usage = _plan(prompt="FAULT:cached=9999").answer()
    assert usage.cached_tokens == usage.prompt_tokens
