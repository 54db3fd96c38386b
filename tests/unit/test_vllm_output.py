"""vLLM's outputs as completions: by their fields alone, so that no vLLM is needed here."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import orjson

from contract.errors import InvalidRequest, TransientError
from gpu_workers.engines import vllm_output
from gpu_workers.engines.vllm_params import Payload


def _payload(**fields: Any) -> Payload:
    return Payload(**({"token_ids": [1], "params": None, "chat": False, "logprobs": None, "schema": False} | fields))


def _choice(finish_reason: str = "stop", tokens: int = 3, **fields: Any) -> Any:
    given = {"index": 0, "text": "abc", "token_ids": list(range(tokens)), "logprobs": None, "stop_reason": None}
    return SimpleNamespace(**(given | {"finish_reason": finish_reason} | fields))


def _output(*choices: Any, cached: int | None = 2) -> Any:
    return SimpleNamespace(prompt_token_ids=[1, 2, 3, 4], num_cached_tokens=cached, outputs=choices)


def _logprob(value: float | None, rank: int, token: str | None) -> Any:
    return SimpleNamespace(logprob=value, rank=rank, decoded_token=token)


def test_usage_counts_every_choice_and_the_cached_part_of_the_prompt() -> None:
    done = vllm_output.completion(1, _payload(), _output(_choice(), _choice(index=1, tokens=4)), cancelled=False)
    assert (done.usage.prompt_tokens, done.usage.cached_tokens, done.usage.output_tokens) == (4, 2, 7)
    odd = vllm_output.completion(1, _payload(), _output(_choice(), cached=9), cancelled=False)
    assert odd.usage.contradictory
    assert (
        vllm_output.completion(1, _payload(), _output(_choice(), cached=None), cancelled=False).usage.cached_tokens == 0
    )


def test_error_of_the_engine_means_not_processed() -> None:
    done = vllm_output.completion(1, _payload(), _output(_choice(), _choice("error")), cancelled=False)
    assert isinstance(done.error, TransientError)
    assert done.choices is None


def test_schema_that_the_core_cannot_follow_is_the_requests_own_fault() -> None:
    for choice in (_choice("error", tokens=0), _choice("error", tokens=5), _choice("stop", tokens=1, text="")):
        done = vllm_output.completion(1, _payload(schema=True), _output(_choice(), choice), cancelled=False)
        assert isinstance(done.error, InvalidRequest)
        assert done.error.param == "response_format"
        assert done.choices is None
    stopped = _choice("stop", tokens=1, text="", stop_reason="{")
    assert vllm_output.completion(1, _payload(schema=True), _output(stopped), cancelled=False).error is None
    assert vllm_output.completion(1, _payload(), _output(_choice(text="")), cancelled=False).error is None


def test_job_that_ended_by_itself_before_its_cancel_came_is_not_cancelled() -> None:
    assert not vllm_output.completion(1, _payload(), _output(_choice("stop")), cancelled=True).cancelled
    cut = vllm_output.completion(1, _payload(), _output(_choice("stop"), _choice("abort")), cancelled=True)
    assert cut.cancelled
    assert cut.choices is not None


def test_b20_infinite_and_missing_log_probabilities_keep_the_answer_and_its_json() -> None:
    places = [
        {0: _logprob(-math.inf, 5, "a"), 7: _logprob(-0.5, 1, "b"), 8: _logprob(math.nan, 2, None)},
        {1: _logprob(math.nan, 1, "c"), 9: _logprob(None, 2, "d")},
        {44: _logprob(-1.0, 1, "e")},
    ]
    for chat in (True, False):
        payload = _payload(chat=chat, logprobs=2)
        done = vllm_output.completion(1, payload, _output(_choice(logprobs=places)), cancelled=False)
        assert done.choices is not None
        strict = json.loads(orjson.dumps(done.choices), parse_constant=lambda name: 1 / 0)[0]["logprobs"]
        if chat:
            first, second, third = strict["content"]
            assert (first["token"], first["logprob"]) == ("a", -9999.0)
            assert [entry["logprob"] for entry in first["top_logprobs"]] == [-0.5, None]
            assert second["logprob"] is None
            assert (third["token"], third["logprob"]) == ("", None)
        else:
            assert strict["token_logprobs"] == [-9999.0, None, None]
            assert strict["top_logprobs"][0] == {"b": -0.5, "": None}


def test_weird_text_passes_untouched() -> None:
    done = vllm_output.completion(1, _payload(), _output(_choice(text="\0 \ud83d")), cancelled=False)
    assert done.choices is not None
    assert done.choices[0]["text"] == "\0 \ud83d"
