"""Keys: UUIDv5, one per pair, never the same for two pairs."""

from __future__ import annotations

import uuid

from hypothesis import given
from hypothesis import strategies as st

from contract import identity

any_text = st.text()
"""Lone surrogates included."""


@given(any_text, any_text)
def test_key_is_a_uuid5(source: str, request_id: str) -> None:
    key = identity.request_key(source, request_id)
    name = f"id\x1f{len(source)}\x1f{source}\x1f{request_id}"
    if all(not "\ud800" <= char <= "\udfff" for char in name):
        assert key == str(uuid.uuid5(identity.NAMESPACE, name))
    assert uuid.UUID(key).version == 5
    assert uuid.UUID(key).variant == uuid.RFC_4122


@given(st.text("ab\x1f0123", max_size=6), st.text("ab\x1f0123", max_size=6), st.integers(0, 12))
def test_moving_the_border_between_source_and_id_gives_another_key(left: str, right: str, at: int) -> None:
    joined = left + right
    pairs = {(left, right), (joined[:at], joined[at:]), (left + "\x1f", right), (left, "\x1f" + right)}
    assert len({identity.request_key(*pair) for pair in pairs}) == len(pairs)


def test_lone_surrogates_are_kept_apart() -> None:
    ids = ["cut \ud83d", "cut \ud83e", "cut \ufffd", "cut ?", "cut "]
    assert len({identity.request_key("s", request_id) for request_id in ids}) == len(ids)


def test_kinds_of_keys_do_not_meet() -> None:
    keys = {
        identity.request_key("", "7"),
        identity.request_key("7", ""),
        identity.record_key("7", 7, 7),
        identity.record_key("7", 77, 7),
        identity.record_key("7", 7, 77),
        identity.line_key("7", 7),
        identity.line_key("7\x1f7", 7),
    }
    assert len(keys) == 7


def test_keys_stay_what_they_were() -> None:
    """A remembered key must be found again by every later version."""
    assert identity.request_key("s", "a") == "dd00fafe-584b-528a-9b91-4cb08b53d3ca"
    assert identity.record_key("headrace.default.online.short", 3, 17) == "c5a74509-da6e-5a81-adf6-98b729cd0f59"
    assert identity.line_key("job-1", 1) == "6060387f-9540-5f20-86d1-21a5f5daeabb"
