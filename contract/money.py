"""Exact money. Decimals from end to end; rounding happens only where a person reads a figure."""

from __future__ import annotations

import dataclasses
from decimal import Context, Decimal

import msgspec

_MILLION = Decimal(1_000_000)
_EXACT = Context(prec=60)
"""Wide enough that no product or sum here is ever rounded."""

NS_PER_HOUR = 3_600_000_000_000


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one request as the engine counted them.

    ``prompt_tokens`` includes ``cached_tokens`` (vLLM's and OpenAI's convention); ``output_tokens``
    counts all choices. ``contradictory`` marks counts that cannot be true and were clamped.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    contradictory: bool = False

    @classmethod
    def counted(cls, prompt: int | None, cached: int | None, output: int | None) -> Usage:
        """Usage from raw engine counts: None is 0, cached is held within [0, prompt]."""
        prompt_n, cached_n, output_n = prompt or 0, cached or 0, output or 0
        clean_prompt, clean_output = max(prompt_n, 0), max(output_n, 0)
        clean_cached = min(max(cached_n, 0), clean_prompt)
        wrong = (clean_prompt, clean_cached, clean_output) != (prompt_n, cached_n, output_n)
        return cls(clean_prompt, clean_cached, clean_output, wrong)

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that the engine really computed."""
        return self.prompt_tokens - self.cached_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Tariff:
    """A version of the price list: US dollars per million tokens."""

    tariff_id: int
    input_usd: Decimal
    cached_input_usd: Decimal
    output_usd: Decimal

    def charge_usd(self, usage: Usage) -> Decimal:
        """Exact charge: computed × input + cached × cached_input + output × output, per million."""
        total = _EXACT.multiply(self.input_usd, usage.prompt_tokens - usage.cached_tokens)
        if usage.cached_tokens:
            total = _EXACT.fma(self.cached_input_usd, usage.cached_tokens, total)
        return _EXACT.divide(_EXACT.fma(self.output_usd, usage.output_tokens, total), _MILLION)


def plain(amount: Decimal) -> str:
    """Money as the API gives it: a decimal string without an exponent, no digit lost."""
    text = f"{amount:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
