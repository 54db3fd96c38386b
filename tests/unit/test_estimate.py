"""Token estimates at publish."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract import settings as contract_settings
from contract.errors import SettingsError
from contract.messages import Request
from producers import estimate
from producers.estimate import Estimator, Ratio


def test_ratio_follows_what_the_engine_counts() -> None:
    ratio = Ratio(4.0)
    for _ in range(500):
        ratio.observe(300, 200)
    assert ratio.value == pytest.approx(1.5, rel=0.05)
    for _ in range(5_000):
        ratio.observe(900, 200)
    assert ratio.value == pytest.approx(4.5, rel=0.05)


@given(st.lists(st.tuples(st.integers(-5, 10**9), st.integers(-5, 10**7)), max_size=50))
def test_ratio_stays_sane_whatever_is_reported(observed: list[tuple[int, int]]) -> None:
    ratio = Ratio(4.0)
    for prompt_bytes, prompt_tokens in observed:
        ratio.observe(prompt_bytes, prompt_tokens)
    assert 0.25 <= ratio.value <= 64


def test_pools_learn_apart() -> None:
    estimator = Estimator(contract_settings.build({"pools": {"default": {}, "b": {"bytes_per_token": 2}}}))
    for _ in range(1_000):
        estimator.observe("default", 100, 100)
    assert estimator.bytes_per_token("default") == pytest.approx(1.0, rel=0.1)
    assert estimator.bytes_per_token("b") == 2
    request = Request(input="x" * 400)
    assert estimator.prompt_tokens("b", request, 400) == 200


def test_text_is_counted_wherever_it_stands() -> None:
    request = Request(
        messages=[
            {"role": "system", "content": "abc"},
            {"role": "user", "content": [{"type": "text", "text": "äö"}, {"type": "image_url", "image_url": {}}]},
            {"role": "assistant", "content": None},
        ],
        tools=[{"a": 1}],
    )
    assert estimate.size_bytes(request) == 3 + 4 + len('[{"a":1}]')
    assert estimate.size_bytes(Request(prompt_token_ids=[1, 2])) == 0


def test_token_prompt_is_exact() -> None:
    estimator = Estimator(contract_settings.Settings())
    assert estimator.prompt_tokens("default", Request(prompt_token_ids=[1] * 77), 0) == 77


def test_tokenizer_of_a_pool_counts_exactly(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "a": 1, "b": 2}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        settings = contract_settings.build({"pools": {"default": {"tokenizer": str(path)}}})
        request = Request(input="a b a \ud83d")
        assert Estimator(settings).prompt_tokens("default", request, 10) == 4


@pytest.mark.parametrize("content", [None, "not json"])
def test_unreadable_tokenizer_is_a_settings_error(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    settings = contract_settings.build({"pools": {"default": {"tokenizer": str(path)}}})
    with pytest.raises(SettingsError, match=r"pools\.default\.tokenizer"):
        Estimator(settings).prompt_tokens("default", Request(input="a"), 1)
