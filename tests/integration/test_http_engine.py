"""The http engine against an endpoint that misbehaves in every way endpoints do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import tokenizers

from contract import settings as contract_settings
from contract.errors import EngineDied, FatalError, InvalidRequest, TransientError
from contract.messages import Request
from contract.settings import Settings
from gpu_workers.engine import Completion, Prepared
from tests.acceptance.harness import free_port
from tests.integration.engine_rig import Rig, parse
from tests.integration.http_endpoint import HttpEndpoint

pytestmark = pytest.mark.asyncio(loop_scope="function")

_LONG = Request(prompt="on and on", max_tokens=500, ignore_eos=True)


def _settings(**engine: Any) -> Settings:
    section = {
        "kind": "http",
        "http_url": f"http://127.0.0.1:{free_port()}/v1",
        "max_requests": 16,
        "probe_timeout_s": 1.0,
        "simulated_step_ms": 2,
        "simulated_faults": True,
    }
    return contract_settings.build({"engine": section | engine})


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    one = Rig(_settings())
    await one.start()
    yield one
    await one.close()
    assert one.twice == []


def _endpoint(rig: Rig) -> HttpEndpoint:
    assert rig.endpoint is not None
    return rig.endpoint


async def _running(rig: Rig, count: int) -> None:
    await rig.until(lambda: _endpoint(rig).engine.stats().running == count)


# -- the endpoint is in trouble -------------------------------------------------------------------------


async def test_endpoint_killed_under_load_is_one_death_without_failures_and_start_waits_until_it_is_back() -> None:
    rig = Rig(_settings())
    await rig.start()
    ids = rig.submit(*[_LONG] * 16)
    await _running(rig, 16)
    rig.kill()
    death = await rig.wait_for_death(5)
    assert "broke every connection" in str(death)
    await rig.engine.stop(5)
    starting = asyncio.create_task(rig.engine.start(rig))
    await asyncio.sleep(0.7)
    assert not starting.done(), "it must wait for an endpoint that was up before"
    assert not rig.heard.keys() & set(ids)
    assert len(rig.deaths) == 1
    await _endpoint(rig).start()
    await asyncio.wait_for(starting, 5)
    rig.deaths.clear()
    await rig.ask_one(prompt="back again", max_tokens=3)
    await rig.close()


async def test_endpoint_restarted_at_once_has_died_all_the_same(rig: Rig) -> None:
    ids = rig.submit(*[_LONG] * 16)
    await _running(rig, 16)
    await _endpoint(rig).start()  # breaks every connection and listens again, before anybody can look
    await rig.wait_for_death(5)
    await asyncio.sleep(0.2)
    assert not rig.heard.keys() & set(ids), "nobody's try is used up"
    assert len(rig.deaths) == 1
    await rig.start()
    await rig.ask_one(prompt="back again", max_tokens=3)


async def test_one_connection_broken_among_others_is_that_requests_failed_try(rig: Rig) -> None:
    ids = rig.submit(*[_LONG] * 8)
    await _running(rig, 8)
    _endpoint(rig).faults.append("hang up")
    (failed,) = await rig.ask(parse(prompt="one", max_tokens=3))
    assert isinstance(failed, Completion)
    assert isinstance(failed.error, TransientError)
    assert rig.deaths == []
    rig.engine.cancel(ids)
    await rig.wait(ids)


async def test_question_that_meets_a_closed_door_is_asked_again_when_it_opens(rig: Rig) -> None:
    endpoint = _endpoint(rig)
    await endpoint.stop()
    (job_id,) = rig.submit(Request(prompt="hello", max_tokens=3))
    await asyncio.sleep(0.05)
    await endpoint.start()
    (answer,) = await rig.wait([job_id])
    assert answer.error is None
    assert rig.deaths == []


async def test_endpoint_that_stops_with_500_while_its_health_is_200_uses_up_nobodys_try(rig: Rig) -> None:
    _endpoint(rig).always = "500"
    ids = rig.submit(*[Request(prompt=f"{number}", max_tokens=3) for number in range(8)])
    assert "cannot schedule new futures" in str(await rig.wait_for_death(5))
    await asyncio.sleep(0.2)
    assert not rig.heard.keys() & set(ids)
    assert len(rig.deaths) == 1
    _endpoint(rig).always = ""
    await rig.start()
    await rig.ask_one(prompt="back again", max_tokens=3)


@pytest.mark.parametrize("fault", ["500", "502", "503", "504", "408", "301", "truncated", "garbage", "aborted"])
async def test_failure_of_one_answer_is_transient_and_the_neighbours_are_answered(rig: Rig, fault: str) -> None:
    _endpoint(rig).faults.append(fault)
    failed, good = await rig.ask(parse(prompt="one", max_tokens=3), parse(prompt="other", max_tokens=3))
    fates = [answer.error for answer in (failed, good) if isinstance(answer, Completion)]
    assert sorted(type(fate).__name__ for fate in fates) == ["NoneType", "TransientError"]
    assert rig.deaths == []
    await rig.ask_one(prompt="one", max_tokens=3)


async def test_silent_endpoint_is_found_by_the_probe_in_its_time_though_health_says_200(rig: Rig) -> None:
    await rig.engine.probe(1.0)
    _endpoint(rig).always = "silence"
    before = len(_endpoint(rig).bodies)
    (job_id,) = rig.submit(Request(prompt="hello?", max_tokens=3))
    await rig.until(lambda: len(_endpoint(rig).bodies) > before)
    began = time.monotonic()
    with pytest.raises(EngineDied, match="one token"):
        await rig.engine.probe(0.5)
    assert time.monotonic() - began < 1.5
    assert job_id not in rig.heard
    _endpoint(rig).always = ""
    await rig.start()
    await rig.ask_one(prompt="back again", max_tokens=3)


async def test_one_silent_answer_is_ended_by_cancelling_and_the_probe_finds_the_endpoint_alive(rig: Rig) -> None:
    _endpoint(rig).faults.append("silence")
    (job_id,) = rig.submit(Request(prompt="hello?", max_tokens=3))
    await rig.until(lambda: not _endpoint(rig).faults)
    await rig.engine.probe(1.0)
    rig.engine.cancel([job_id])
    (completion,) = await rig.wait([job_id])
    assert completion.cancelled


async def test_probe_asks_for_a_token_only_when_nothing_was_answered_since_the_last(rig: Rig) -> None:
    await rig.engine.probe(1.0)
    before = len(_endpoint(rig).bodies)
    await rig.ask_one(prompt="progress", max_tokens=3)
    await rig.engine.probe(1.0)
    assert len(_endpoint(rig).bodies) == before + 1
    await rig.engine.probe(1.0)
    assert len(_endpoint(rig).bodies) == before + 2
    assert _endpoint(rig).bodies[-1]["max_tokens"] == 1


# -- the endpoint is busy -------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["429", "503"])
async def test_retry_after_is_honoured_by_all_and_everybody_is_answered(rig: Rig, status: str) -> None:
    _endpoint(rig).faults.append(f"{status} 1")
    began = time.monotonic()
    (first,) = rig.submit(Request(prompt="first", max_tokens=3))
    await rig.until(lambda: rig.engine.stats().waiting == 1)
    asked = len(_endpoint(rig).bodies)
    (second,) = rig.submit(Request(prompt="second", max_tokens=3))
    await rig.until(lambda: rig.engine.stats().waiting == 2)
    assert len(_endpoint(rig).bodies) == asked, "asked again before the time"
    assert [answer.error for answer in await rig.wait([first, second])] == [None, None]
    assert 0.9 < time.monotonic() - began < 4
    assert rig.deaths == []


async def test_429_without_a_time_is_asked_again_soon(rig: Rig) -> None:
    _endpoint(rig).faults.extend(["429", "429"])
    assert (await rig.ask_one(prompt="patience", max_tokens=3)).usage.output_tokens > 0


async def test_endpoint_that_asks_for_an_hour_gets_the_request_sent_back_and_a_waiting_one_can_be_cancelled(
    rig: Rig,
) -> None:
    _endpoint(rig).faults.append("429 3600")
    (answer,) = await rig.ask(parse(prompt="x", max_tokens=3))
    assert isinstance(answer, Completion)
    assert isinstance(answer.error, TransientError)
    assert answer.error.code == "rate_limited"
    _endpoint(rig).faults.append("429 20")
    (job_id,) = rig.submit(Request(prompt="y", max_tokens=3))
    await rig.until(lambda: rig.engine.stats().waiting == 1)
    rig.engine.cancel([job_id])
    (completion,) = await rig.wait([job_id], timeout_s=2)
    assert completion.cancelled
    await rig.until(lambda: rig.engine.stats().waiting == 0)


# -- the endpoint answers -------------------------------------------------------------------------------


async def test_400_is_its_senders_fault_with_the_endpoints_message_and_param(rig: Rig) -> None:
    wrong, good = await rig.ask(
        parse(prompt="x", logit_bias={"900000": 1}, max_tokens=3), parse(prompt="good", max_tokens=3)
    )
    assert isinstance(wrong, Completion)
    assert isinstance(wrong.error, InvalidRequest)
    assert wrong.error.param == "logit_bias"
    assert "token ids" in wrong.error.message
    assert isinstance(good, Completion)
    assert good.error is None


async def test_usage_comes_from_the_answer_cached_tokens_apart_and_is_estimated_and_marked_when_missing(
    rig: Rig,
) -> None:
    counted = await rig.ask_one(prompt="FAULT:cached=5 a prompt of some length", max_tokens=7, ignore_eos=True)
    assert (counted.usage.cached_tokens, counted.usage.output_tokens, counted.usage.contradictory) == (5, 7, False)
    assert counted.usage.computed_tokens == counted.usage.prompt_tokens - 5
    _endpoint(rig).faults.append("no usage")
    guessed = await rig.ask_one(prompt="a prompt of some length", max_tokens=7, ignore_eos=True)
    assert guessed.usage.contradictory
    assert guessed.usage.prompt_tokens == 6
    assert 0 < guessed.usage.output_tokens <= 7


async def test_cancelling_closes_the_connection_so_that_the_endpoint_stops_working_on_it(rig: Rig) -> None:
    doomed, spared = rig.submit(_LONG, _LONG)
    await _running(rig, 2)
    rig.engine.cancel([doomed])
    (completion,) = await rig.wait([doomed], timeout_s=1)
    assert completion.cancelled
    await _running(rig, 1)
    assert _endpoint(rig).cancelled == 1
    assert (await rig.wait([spared]))[0].usage.output_tokens == 500


async def test_priority_of_a_job_and_every_sampling_default_reach_an_endpoint_that_knows_them(rig: Rig) -> None:
    await rig.wait(rig.submit(Request(prompt="low", max_tokens=3), priority=7))
    body = _endpoint(rig).bodies[-1]
    assert body["priority"] == 7
    assert (body["temperature"], body["top_p"], body["top_k"], body["repetition_penalty"]) == (1.0, 1.0, 0, 1.0)


async def test_endpoint_that_refuses_what_openai_does_not_know_is_not_sent_it_unasked() -> None:
    rig = Rig(_settings())
    _endpoint(rig).strict = True
    await rig.start()
    await rig.ask_one(prompt="plain", max_tokens=3)
    assert not _endpoint(rig).bodies[-1].keys() & {"priority", "top_k", "min_tokens", "repetition_penalty"}
    (answer,) = await rig.ask(parse(prompt="x", top_k=5, max_tokens=3))
    assert isinstance(answer, Completion)
    assert isinstance(answer.error, InvalidRequest)
    assert answer.error.param == "top_k"
    await rig.close()


async def test_endpoint_with_chat_only_answers_chat_and_other_prompts_are_refused_before_it() -> None:
    rig = Rig(_settings())
    _endpoint(rig).chat_only = True
    await rig.start()
    await rig.ask_one(input="hello", max_tokens=3)
    (refusal,) = await rig.ask(parse(prompt="x"))
    assert isinstance(refusal, InvalidRequest)
    assert refusal.param == "prompt"
    await rig.engine.probe(1.0)
    await rig.close()


async def test_longer_prompt_than_the_endpoints_own_context_is_refused_though_the_settings_allow_it() -> None:
    rig = Rig(_settings(max_model_len=2_048))
    _endpoint(rig).max_model_len = 100
    info = await rig.start()
    assert info.max_model_len == 100
    (refusal,) = await rig.ask(parse(prompt_token_ids=[5] * 150))
    assert isinstance(refusal, InvalidRequest)
    assert refusal.code == "context_length_exceeded"
    await rig.close()


async def test_no_more_is_asked_at_once_than_connections_are_allowed() -> None:
    rig = Rig(_settings(http_connections=10))
    assert (await rig.start()).max_requests == 10
    await rig.close()


# -- settings that cannot work --------------------------------------------------------------------------


async def test_nothing_at_the_url_is_fatal_at_the_first_start_and_says_what_to_do() -> None:
    rig = Rig(_settings())
    rig.endpoint = None
    with pytest.raises(FatalError, match=r"engine\.http_url = http://127.*engine\.http_serve"):
        await asyncio.wait_for(rig.start(), 5)
    await rig.engine.stop(1)


async def test_silent_endpoint_is_fatal_at_the_first_start_and_a_busy_one_is_waited_for() -> None:
    rig = Rig(_settings(probe_timeout_s=0.5))
    _endpoint(rig).always = "silence"
    with pytest.raises(FatalError, match="silence"):
        await asyncio.wait_for(rig.start(), 5)
    _endpoint(rig).always = ""
    _endpoint(rig).faults.append("429 1")
    await asyncio.wait_for(rig.start(), 5)
    await rig.close()


async def test_wrong_key_is_fatal_by_name_the_right_one_is_sent_and_a_revoked_one_is_a_death() -> None:
    wrong = Rig(_settings(http_api_key="sk-wrong"))
    _endpoint(wrong).key = "sk-right"
    with pytest.raises(FatalError, match=r"engine\.http_api_key") as caught:
        await wrong.start()
    assert "sk-" not in str(caught.value)
    await wrong.close()
    right = Rig(_settings(http_api_key="sk-right"))
    _endpoint(right).key = "sk-right"
    await right.start()
    await right.ask_one(prompt="x", max_tokens=3)
    _endpoint(right).key = "sk-other"
    (job_id,) = right.submit(Request(prompt="x", max_tokens=3))
    await right.wait_for_death(5)
    assert job_id not in right.heard
    with pytest.raises(FatalError, match=r"engine\.http_api_key"):
        await right.start()
    await right.close()


async def test_unknown_model_is_fatal_and_the_models_that_are_there_are_named() -> None:
    rig = Rig(_settings(http_model="no-such-model"))
    with pytest.raises(FatalError, match=r"no-such-model.*tiny-llama.*engine\.http_model"):
        await rig.start()
    await rig.close()


async def test_the_pools_name_is_the_requests_and_the_endpoints_own_name_goes_over_the_wire() -> None:
    rig = Rig(_settings(http_model="org/model-v2"))
    _endpoint(rig).model = "org/model-v2"
    assert (await rig.start()).model == "tiny-llama"
    await rig.ask_one(prompt="x", model="tiny-llama", max_tokens=3)
    assert _endpoint(rig).bodies[-1]["model"] == "org/model-v2"
    await rig.close()


async def test_tokenizer_of_the_pool_counts_instead_of_guessing(model_path: Path) -> None:
    settings = contract_settings.build(
        {
            "engine": {"kind": "http", "http_url": "http://127.0.0.1:9/v1", "max_model_len": 64},
            "pools": {"default": {"tokenizer": str(model_path)}},
        }
    )
    rig = Rig(settings)
    (fits,) = rig.engine.prepare([Request(prompt="the quick brown fox")])
    assert isinstance(fits, Prepared)
    counted = len(tokenizers.Tokenizer.from_file(str(model_path / "tokenizer.json")).encode("the quick brown fox").ids)
    assert (fits.prompt_tokens, fits.max_output_tokens) == (counted, 64 - counted)
    assert counted != 5, "the estimate from bytes would not be noticed"
    (too_long,) = rig.engine.prepare([Request(prompt="the quick brown fox " * 20)])
    assert isinstance(too_long, InvalidRequest)
    assert too_long.code == "context_length_exceeded"
