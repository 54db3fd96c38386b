"""Exact money."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.money import Tariff, Usage, plain
from tests.data import field_case

prices = st.decimals(0, 1_000, places=9)
counts = st.integers(0, 10**12)


def tariff(prices_per_million: dict[str, str]) -> Tariff:
    usd = {name: Decimal(price) for name, price in prices_per_million.items()}
    return Tariff(1, usd["input"], usd.get("cached_input", usd["input"]), usd["output"])


def test_sums_of_tiny_charges_are_exact() -> None:
    """B16."""
    data = field_case("B16-money.json")
    for case in data["cases"]:
        usage = Usage.counted(case["input_tokens_each"], 0, case["output_tokens_each"])
        each = tariff(data["price_per_million"]).charge_usd(usage)
        assert each * case["requests"] == Decimal(case["exact_total"]), case["name"]


def test_cached_tokens_are_charged_once() -> None:
    """B21: also when the counts contradict each other; then the usage is marked."""
    data = field_case("B21-usage.json")
    for case in data["cases"]:
        usage = Usage.counted(case["prompt"], case["cached"], case["completion"])
        assert tariff(data["price_per_million"]).charge_usd(usage) == Decimal(case["exact_cost"]), case["name"]
        assert usage.contradictory is ((case["cached"] or 0) > case["prompt"])


@given(prices, prices, prices, counts, counts, counts)
def test_charge_is_exact_and_its_string_loses_no_digit(
    input_usd: Decimal, cached_usd: Decimal, output_usd: Decimal, computed: int, cached: int, output: int
) -> None:
    usage = Usage.counted(computed + cached, cached, output)
    charge = Tariff(1, input_usd, cached_usd, output_usd).charge_usd(usage)
    nano = [int(price * 10**9) for price in (input_usd, cached_usd, output_usd)]
    exact = nano[0] * computed + nano[1] * cached + nano[2] * output
    assert int(charge.scaleb(15)) == exact
    assert Decimal(plain(charge)) == charge


@given(st.none() | st.integers(-5, 50), st.none() | st.integers(-5, 50), st.none() | st.integers(-5, 50))
def test_usage_is_never_negative_and_contradictions_are_marked(
    prompt: int | None, cached: int | None, output: int | None
) -> None:
    usage = Usage.counted(prompt, cached, output)
    assert 0 <= usage.cached_tokens <= usage.prompt_tokens
    assert usage.computed_tokens + usage.cached_tokens == usage.prompt_tokens
    asked = ((prompt or 0), (cached or 0), (output or 0))
    assert usage.contradictory is (asked != (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens))


@pytest.mark.parametrize(
    ("amount", "text"),
    [("0", "0"), ("1E-7", "0.0000001"), ("1E+3", "1000"), ("1.500", "1.5"), ("100", "100"), ("0.00", "0")],
)
def test_money_is_written_without_an_exponent(amount: str, text: str) -> None:
    assert plain(Decimal(amount)) == text
