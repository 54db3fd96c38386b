"""The simulated GPU under any order of arrivals, removals and steps."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st

from gpu_workers.engines.simulated_gpu import SimulatedGpu, Speed

_KV_TOKENS = 64
_SLOTS = 5

_SEQUENCES = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(0, 2), st.integers(0, 40)), min_size=1, max_size=25
)
"""(prompt tokens, output tokens, priority, step before which it arrives)"""


def _gpu(speed: Speed = Speed(1000.0, 0.010, 0.001)) -> SimulatedGpu:
    return SimulatedGpu(speed, slots=_SLOTS, kv_tokens=_KV_TOKENS)


@hypothesis.given(_SEQUENCES)
def test_every_sequence_ends_once_with_all_its_tokens_whatever_is_preempted(
    sequences: list[tuple[int, int, int, int]],
) -> None:
    gpu = _gpu()
    ended: dict[int, int] = {}
    arrivals = sorted(enumerate(sequences), key=lambda pair: pair[1][3])
    needed = sum(prompt + output for prompt, output, _, _ in sequences)
    for step in range(needed * 3 + 50):
        while arrivals and arrivals[0][1][3] <= step:
            key, (prompt, output, priority, _) = arrivals.pop(0)
            gpu.add(key, prompt_tokens=prompt, output_tokens=output, priority=priority)
        gpu.begin_step()
        assert gpu.running <= _SLOTS
        held_before = gpu.kv_held_tokens
        running = gpu.running
        assert held_before + running <= _KV_TOKENS, "a step would write past the cache"
        for done in gpu.end_step():
            assert isinstance(done, int)
            assert done not in ended
            ended[done] = step
        if not arrivals and not gpu.running and not gpu.waiting:
            break
    assert ended.keys() == set(range(len(sequences)))
    assert gpu.kv_held_tokens == 0


@hypothesis.given(_SEQUENCES, st.data())
def test_removed_sequence_gives_back_its_room_and_says_what_it_made(
    sequences: list[tuple[int, int, int, int]], data: st.DataObject
) -> None:
    gpu = _gpu()
    for key, (prompt, output, priority, _) in enumerate(sequences):
        gpu.add(key, prompt_tokens=prompt, output_tokens=output, priority=priority)
    ended: set[object] = set()
    for _ in range(data.draw(st.integers(0, 20))):
        gpu.begin_step()
        ended.update(gpu.end_step())
    for key in data.draw(st.permutations(range(len(sequences)))):
        produced = gpu.remove(key)
        assert (produced == 0) if key in ended else (0 <= produced < sequences[key][1])
        assert gpu.remove(key) == 0
    assert (gpu.running, gpu.waiting, gpu.kv_held_tokens) == (0, 0, 0)
    assert gpu.begin_step() is None


def test_step_takes_longer_with_more_running_and_with_prefill() -> None:
    gpu = _gpu()
    gpu.add("a", prompt_tokens=10, output_tokens=5)
    assert gpu.begin_step() == pytest.approx(0.010 + 0.001 + 10 / 1000)
    gpu.end_step()
    assert gpu.begin_step() == pytest.approx(0.011), "decoding only"
    gpu.end_step()
    gpu.add("b", prompt_tokens=20, output_tokens=5)
    assert gpu.begin_step() == pytest.approx(0.010 + 0.002 + 20 / 1000)


def test_lower_priority_number_is_admitted_first_and_keeps_its_room_longest() -> None:
    gpu = _gpu()
    for key, priority in (("low", 1), ("low too", 1), ("high", 0)):
        gpu.add(key, prompt_tokens=15, output_tokens=30, priority=priority)
    finished: list[object] = []
    while gpu.begin_step() is not None:
        finished += gpu.end_step()
    assert finished[0] == "high"
    assert gpu.preemptions > 0, "three times 45 tokens do not fit into 64"
    assert finished == ["high", "low", "low too"]


def test_sequence_that_could_never_fit_is_refused_instead_of_waiting_for_ever() -> None:
    with pytest.raises(ValueError, match="never fit"):
        _gpu().add("huge", prompt_tokens=60, output_tokens=5)
    gpu = _gpu()
    gpu.add("twice", prompt_tokens=1, output_tokens=1)
    with pytest.raises(ValueError, match="already here"):
        gpu.add("twice", prompt_tokens=1, output_tokens=1)
