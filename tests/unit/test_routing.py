"""Topic names and buckets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.routing import Route, TopicNames, bucket_of, is_word

words = st.from_regex(r"[a-z0-9][a-z0-9_-]{0,8}", fullmatch=True)


@given(words, words, words, st.sampled_from(["headrace", "team.headrace", "a.b.c"]))
def test_topic_name_is_read_back(pool: str, class_name: str, bucket: str, prefix: str) -> None:
    names = TopicNames(prefix)
    assert names.parse(names.request(pool, class_name, bucket)) == Route(pool, class_name, bucket)


@pytest.mark.parametrize(
    "topic",
    ["headrace.results", "headrace.replies", "headrace.dead", "headrace.control", "headracex.a.b.c", "other.a.b.c", ""],
)
def test_shared_and_foreign_topics_are_no_request_topics(topic: str) -> None:
    assert TopicNames("headrace").parse(topic) is None


def test_shared_names_are_four_different_ones() -> None:
    names = TopicNames("p")
    assert len({names.results, names.replies, names.dead, names.control}) == 4


@pytest.mark.parametrize(
    ("tokens", "bucket"),
    [(0, "short"), (256, "short"), (257, "medium"), (1024, "medium"), (1025, "long"), (10**12, "long")],
)
def test_edge_belongs_to_the_bucket_below_and_the_last_holds_the_rest(tokens: int, bucket: str) -> None:
    assert bucket_of(tokens, {"short": 256, "medium": 1024, "long": 100_000}) == bucket


@pytest.mark.parametrize("name", ["", "A", "a.b", "a b", "-a", "_a", "a" * 64, "é", "a\n"])
def test_what_cannot_be_part_of_a_topic_is_no_word(name: str) -> None:
    assert not is_word(name)
    assert is_word("a" * 63)
