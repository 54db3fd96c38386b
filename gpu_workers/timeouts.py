"""How long an attempt may take, learned from those that ended. Pure; time is an argument.

Inference timeout = factor × (prefill estimate + tokens × P99 per token), never below a floor; the
request's own deadline is the other timeout. Until enough has been seen, only the floor counts.
"""

from __future__ import annotations

import collections

from contract.settings import Engine

_SAMPLES = 512
_ENOUGH = 50
_REFRESH_EVERY = 64
_PREFILL_TOKEN_COST = 0.125
"""A prompt token's time in output tokens; as in ``metering``."""


class Timeouts:
    """A sliding view on time per token: total seconds ÷ (output + prompt / 8) of the last 512 attempts."""

    def __init__(self, engine: Engine) -> None:
        self._factor = engine.inference_factor
        self._min_s = engine.inference_min_s
        self._samples: collections.deque[float] = collections.deque(maxlen=_SAMPLES)
        self._seen = 0
        self._p99_s = 0.0
        self._least_s = 0.0

    def note(self, *, prompt_tokens: int, output_tokens: int, seconds: float) -> None:
        """An attempt ended as it should."""
        self._samples.append(seconds / max(1.0, output_tokens + prompt_tokens * _PREFILL_TOKEN_COST))
        self._seen += 1
        if self._seen >= _ENOUGH and self._seen % _REFRESH_EVERY == _ENOUGH % _REFRESH_EVERY:
            ordered = sorted(self._samples)
            self._p99_s = ordered[int(len(ordered) * 0.99)]
            self._least_s = ordered[0]

    def inference_s(self, *, prompt_tokens: int, output_tokens: int) -> float:
        """Seconds an attempt may take before it counts as stuck."""
        tokens = output_tokens + prompt_tokens * _PREFILL_TOKEN_COST
        return max(self._min_s, self._factor * tokens * self._p99_s)

    def least_s(self, *, prompt_tokens: int) -> float:
        """The least time a request can need: its prompt and one token at the best speed seen."""
        return (1 + prompt_tokens * _PREFILL_TOKEN_COST) * self._least_s
