"""The simulated engine over a clock that moves when told: when things end, and what faults do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from contract import settings as contract_settings
from contract.errors import EngineDied, FatalError, InvalidRequest, TransientError
from contract.messages import Request
from gpu_workers.engine import Completion, Job, Prepared
from gpu_workers.engines.clock import VirtualClock
from gpu_workers.engines.simulated import SimulatedEngine

_AT_ONCE = {
    "simulated_prefill_tokens_per_s": 0,
    "simulated_step_ms": 0,
    "simulated_step_ms_per_request": 0,
}
_TIMED = {
    "simulated_prefill_tokens_per_s": 1_000,
    "simulated_step_ms": 10,
    "simulated_step_ms_per_request": 1,
}
"""A lone request of 10 prompt and 20 output tokens takes 10 + 20 × 11 = 230 ms."""


class Bench:
    """An engine, its clock, and all that its listener hears."""

    def __init__(self, **engine: Any) -> None:
        section = {"kind": "simulated", "simulated_faults": True, "max_requests": 16} | engine
        self.clock = VirtualClock()
        self.engine = SimulatedEngine(contract_settings.build({"engine": section}), self.clock)
        self.calls: list[list[Completion]] = []
        self.deaths: list[EngineDied] = []

    def finished(self, completions: Sequence[Completion]) -> None:
        self.calls.append(list(completions))

    def died(self, error: EngineDied) -> None:
        self.deaths.append(error)

    async def start(self) -> Bench:
        await self.engine.start(self)
        return self

    def submit(self, *prompts: str, first_id: int = 1, **fields: Any) -> None:
        fields = {"max_tokens": 20, "ignore_eos": True} | fields
        jobs = []
        for job_id, prepared in enumerate(
            self.engine.prepare([Request(prompt=prompt, **fields) for prompt in prompts]), first_id
        ):
            assert isinstance(prepared, Prepared)
            jobs.append(Job(job_id, prepared))
        self.engine.submit(jobs)

    @property
    def heard(self) -> dict[int, Completion]:
        completions = [completion for call in self.calls for completion in call]
        by_id = {completion.job_id: completion for completion in completions}
        assert len(by_id) == len(completions), "a job was named twice"
        return by_id


_FORTY_BYTES = "x" * 40


async def test_without_rates_a_batch_ends_in_one_call_on_the_next_turn() -> None:
    bench = await Bench(**_AT_ONCE).start()
    bench.submit(*(f"prompt {number}" for number in range(16)))
    assert bench.calls == [], "the listener must not hear from inside submit"
    bench.clock.advance(0)
    assert [len(call) for call in bench.calls] == [16]


async def test_with_the_real_clock_a_batch_ends_in_one_call_on_the_next_turn() -> None:
    bench = Bench(**_AT_ONCE)
    bench.engine = SimulatedEngine(contract_settings.build({"engine": {"kind": "simulated"} | _AT_ONCE}))
    await bench.start()
    bench.submit("one", "two")
    bench.submit("three", first_id=3)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [len(call) for call in bench.calls] == [3]


async def test_time_of_an_answer_is_prefill_and_a_step_per_token() -> None:
    bench = await Bench(**_TIMED).start()
    bench.submit(_FORTY_BYTES)
    bench.clock.advance(0.229)
    assert bench.calls == []
    bench.clock.advance(0.002)
    assert bench.heard[1].usage.output_tokens == 20


async def test_batching_slows_each_but_serves_many_together() -> None:
    bench = await Bench(**_TIMED).start()
    bench.submit(*[_FORTY_BYTES] * 10)
    bench.clock.advance(0.230)
    assert bench.calls == []
    bench.clock.advance(10 * 0.010 + 20 * 0.020 - 0.230 + 1e-6)
    assert [len(call) for call in bench.calls] == [10]


async def test_closed_batch_ends_as_a_whole_and_a_job_cut_meanwhile_keeps_its_tokens() -> None:
    bench = await Bench(**_TIMED, closed_batches=True).start()
    bench.submit(_FORTY_BYTES, "y" * 40, max_tokens=5)
    bench.submit("z" * 40, first_id=3)
    bench.clock.advance(0.2)
    assert not bench.calls
    bench.engine.cancel([1])
    bench.clock.advance(0.5)
    assert [[one.job_id for one in call] for call in bench.calls] == [[1], [2, 3]]
    assert [bench.heard[number].usage.output_tokens for number in (1, 2, 3)] == [5, 5, 20]
    assert bench.heard[1].cancelled


async def test_clock_that_jumps_far_ahead_loses_no_step() -> None:
    bench = await Bench(**_TIMED).start()
    bench.submit(_FORTY_BYTES, max_tokens=500)
    bench.clock.advance(3_600)
    assert bench.heard[1].usage.output_tokens == 500
    assert bench.engine.stats().running == 0


async def test_full_kv_cache_preempts_and_everything_is_answered_in_full() -> None:
    bench = await Bench(**_TIMED, kv_tokens=256, max_model_len=200).start()
    bench.submit(*[_FORTY_BYTES] * 8, max_tokens=100)
    bench.clock.advance(1.0)
    assert 0.5 < bench.engine.stats().kv_usage <= 1.0
    bench.clock.advance(100)
    assert len(bench.heard) == 8
    assert {completion.usage.output_tokens for completion in bench.heard.values()} == {100}
    assert bench.engine.stats().preemptions > 0


async def test_cancelled_job_ends_with_what_there_was_and_its_neighbour_goes_on() -> None:
    bench = await Bench(**_TIMED).start()
    bench.submit("cancel me", "leave me", max_tokens=100)
    bench.clock.advance(0.5)
    bench.engine.cancel([1, 99])
    assert bench.calls == []
    bench.clock.advance(0)
    cut = bench.heard[1]
    assert cut.cancelled
    assert 0 < cut.usage.output_tokens < 100
    assert cut.choices is not None
    assert cut.choices[0]["finish_reason"] == "abort"
    bench.clock.advance(10)
    assert not bench.heard[2].cancelled


@pytest.mark.parametrize("rates", [_AT_ONCE, _TIMED])
async def test_job_cancelled_in_the_turn_it_was_submitted_still_ends_once(rates: dict[str, Any]) -> None:
    bench = await Bench(**rates).start()
    bench.submit("one")
    bench.engine.cancel([1])
    bench.clock.advance(10)
    assert list(bench.heard) == [1]


@pytest.mark.parametrize("rates", [_AT_ONCE, _TIMED])
async def test_death_takes_all_that_is_in_the_engine_and_is_told_once(rates: dict[str, Any]) -> None:
    bench = await Bench(**rates).start()
    bench.submit("a good one", "FAULT:die now", "another")
    bench.clock.advance(10)
    assert len(bench.deaths) == 1
    assert bench.calls == []
    bench.submit("too late", first_id=9)
    bench.clock.advance(10)
    assert bench.calls == []
    with pytest.raises(EngineDied):
        await bench.engine.probe(1)
    await bench.start()
    bench.submit("after the restart", first_id=20)
    bench.clock.advance(10)
    assert list(bench.heard) == [20]


async def test_die_once_spares_the_engine_the_second_time() -> None:
    bench = await Bench(**_AT_ONCE).start()
    bench.submit("FAULT:die-once x")
    bench.clock.advance(0)
    await bench.start()
    bench.submit("FAULT:die-once x", first_id=2)
    bench.clock.advance(0)
    assert len(bench.deaths) == 1
    assert list(bench.heard) == [2]


@pytest.mark.parametrize("rates", [_AT_ONCE, _TIMED])
async def test_deaf_core_answers_nothing_until_it_hears_again(rates: dict[str, Any]) -> None:
    bench = await Bench(**rates).start()
    bench.submit("before")
    bench.clock.advance(10)
    bench.submit("FAULT:hang", "beside", first_id=2)
    bench.clock.advance(0)
    bench.submit("behind", first_id=4)
    bench.clock.advance(60)
    assert list(bench.heard) == [1]
    probe = asyncio.create_task(bench.engine.probe(5))
    await asyncio.sleep(0)
    bench.clock.advance(5)
    with pytest.raises(EngineDied, match="within 5 s"):
        await probe
    bench.engine.resume()
    bench.clock.advance(60)
    assert sorted(bench.heard) == [1, 2, 3, 4]
    await bench.engine.probe(5)


@pytest.mark.parametrize("rates", [_AT_ONCE, _TIMED])
async def test_fault_words_fail_their_own_request_only(rates: dict[str, Any]) -> None:
    bench = await Bench(**rates).start()
    bench.submit("FAULT:transient", "FAULT:transient-once", "FAULT:invalid", "good")
    bench.clock.advance(10)
    kinds = {job_id: type(completion.error) for job_id, completion in bench.heard.items()}
    assert kinds == {1: TransientError, 2: TransientError, 3: InvalidRequest, 4: type(None)}
    bench.submit("FAULT:transient", "FAULT:transient-once", first_id=5)
    bench.clock.advance(10)
    assert bench.heard[5].error is not None
    assert bench.heard[6].error is None


@pytest.mark.parametrize("rates", [_AT_ONCE, _TIMED])
async def test_slow_request_comes_later_and_can_be_cancelled(rates: dict[str, Any]) -> None:
    bench = await Bench(**rates).start()
    bench.submit("FAULT:slow=60000 a", "FAULT:slow=60000 b", "quick")
    bench.clock.advance(10)
    assert list(bench.heard) == [3]
    bench.engine.cancel([2])
    bench.clock.advance(0)
    assert bench.heard[2].cancelled
    bench.clock.advance(60)
    assert sorted(bench.heard) == [1, 2, 3]


async def test_stop_drops_what_is_out_without_a_word_and_may_be_repeated() -> None:
    bench = await Bench(**_TIMED).start()
    bench.submit("one", "FAULT:slow=5 two")
    bench.clock.advance(0.1)
    await bench.engine.stop(1)
    await bench.engine.stop(1)
    bench.clock.advance(100)
    assert (bench.calls, bench.deaths) == ([], [])
    assert bench.engine.stats().running == 0


async def test_kv_cache_too_small_for_one_request_is_told_at_the_start() -> None:
    with pytest.raises(FatalError, match=r"engine.kv_tokens = 100"):
        await Bench(kv_tokens=100, max_model_len=200).start()
