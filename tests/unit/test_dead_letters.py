"""Field case B13, its dead-letter half: the record always fits, the reason always stays."""

from __future__ import annotations

import collections

from hypothesis import given
from hypothesis import strategies as st

from broker import records
from consumers import dead_letters
from consumers.dead_letters import dead_letter
from consumers.item import Desk, Headers, Item, Lease, Outcome
from contract.routing import Route
from contract.statuses import Status

LIMIT = 10_000


def outcome(key: bytes | None, value: bytes | None, headers: Headers, message: str = "why") -> Outcome:
    lease = Lease("p.default.online.short", 3, 1, Route("default", "online", "short"), collections.deque())
    item = Item(lease, 42, 1_000, key, value, headers)
    return Desk("w", 1).outcome(item, Status.FAILED, 2_000, code="engine_error", message=message, dead=True)


def test_small_record_is_kept_whole() -> None:
    letter = dead_letter(outcome(b"k", b"value", [("x", None)]), LIMIT)
    assert (letter.key, letter.value) == (b"k", b"value")
    headers = dict(letter.headers)
    assert headers["x"] is None
    assert headers[dead_letters.REASON] == b"engine_error"
    assert headers[dead_letters.MESSAGE] == b"why"
    assert headers[dead_letters.TOPIC] == b"p.default.online.short"
    assert (headers[dead_letters.PARTITION], headers[dead_letters.OFFSET]) == (b"3", b"42")
    assert dead_letters.CUT_BYTES not in headers


def test_record_at_the_limit_loses_its_payload_but_says_how_much() -> None:
    letter = dead_letter(outcome(b"k", b"v" * (LIMIT - 100), []), LIMIT)
    assert letter.value == b""
    assert dict(letter.headers)[dead_letters.CUT_BYTES] == str(LIMIT - 100).encode()


@given(
    key=st.none() | st.integers(0, 3 * LIMIT).map(lambda n: b"k" * n),
    value=st.none() | st.integers(0, 3 * LIMIT).map(lambda n: b"v" * n),
    headers=st.lists(
        st.tuples(st.text(max_size=20), st.none() | st.integers(0, 2 * LIMIT).map(lambda n: b"h" * n)), max_size=5
    ),
    message=st.text(max_size=3_000),
)
def test_any_record_fits_and_names_its_reason(
    key: bytes | None, value: bytes | None, headers: Headers, message: str
) -> None:
    letter = dead_letter(outcome(key, value, headers, message), LIMIT)
    assert records.fits(letter.key, letter.value, letter.headers, LIMIT)
    found = dict(letter.headers)
    assert found[dead_letters.REASON] == b"engine_error"
    assert found[dead_letters.OFFSET] == b"42"
