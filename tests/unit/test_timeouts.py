from contract.settings import Engine
from gpu_workers.timeouts import Timeouts


def test_before_anything_is_known_only_the_floor_counts() -> None:
    timeouts = Timeouts(Engine(inference_min_s=30, inference_factor=1.5))
    assert timeouts.inference_s(prompt_tokens=10_000, output_tokens=10_000) == 30
    assert timeouts.least_s(prompt_tokens=10_000) == 0


def test_slow_tail_sets_the_limit_and_the_best_speed_the_least_time() -> None:
    timeouts = Timeouts(Engine(inference_min_s=0.001, inference_factor=1.5))
    for number in range(200):
        timeouts.note(prompt_tokens=0, output_tokens=100, seconds=10.0 if number % 50 == 0 else 1.0)
    assert timeouts.inference_s(prompt_tokens=0, output_tokens=100) == 1.5 * 10.0
    assert timeouts.least_s(prompt_tokens=0) == 0.01


def test_prompt_counts_an_eighth_of_output() -> None:
    timeouts = Timeouts(Engine(inference_min_s=0.001))
    for _ in range(100):
        timeouts.note(prompt_tokens=800, output_tokens=0, seconds=1.0)
    by_prompt = timeouts.inference_s(prompt_tokens=80, output_tokens=0)
    assert by_prompt == timeouts.inference_s(prompt_tokens=0, output_tokens=10)
