"""Field case B13, its dead-letter half: the record always fits, the reason always stays. And the way back."""

from __future__ import annotations

import collections
import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker import records
from broker.records import Record
from consumers import dead_letters
from consumers.dead_letters import Place, dead_letter, read, to_replay
from consumers.item import Decoder, Desk, Headers, Item, Lease, Outcome
from contract import identity
from contract.routing import Header, Route
from contract.settings import Settings
from contract.statuses import Status
from headrace.dead import Filter

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


# -- the way back ---------------------------------------------------------------------------------

NOW_MS = 1_800_000_000_000
PASSED = {"deadline": "2020-01-01T00:00:00Z"}
header_lists = st.lists(
    st.tuples(
        st.text(max_size=20) | st.sampled_from(sorted(n for n in vars(dead_letters).values() if str(n)[:3] == "hr-")),
        st.none() | st.binary(max_size=20) | st.integers(-9, 10**19).map(lambda n: b"%d" % n),
    ),
    max_size=12,
)


def record(value: bytes | None, headers: Headers, key: bytes | None = b"k") -> Record:
    return Record("p.dead", 1, 7, 5_000, key, value, headers)


def buried(value: bytes | None, headers: Headers | None = None, limit: int = LIMIT) -> dead_letters.DeadLetterView:
    letter = dead_letter(outcome(b"k", value, headers or []), limit)
    return read(record(letter.value, letter.headers, letter.key))


@given(value=st.none() | st.binary(max_size=2 * LIMIT), headers=header_lists)
def test_what_is_written_is_read_back_also_from_a_record_that_was_a_dead_letter_before(
    value: bytes | None, headers: Headers
) -> None:
    letter = buried(value, headers)
    assert letter.origin == Place("p.default.online.short", 3, 42)
    assert (letter.reason, letter.message, letter.attempts, letter.at_ms) == ("engine_error", "why", 0, 2_000)
    assert letter.place == "1/7"
    assert letter.size_bytes == len(value or b"")
    assert letter.headers == [(name, text) for name, text in headers if not name.startswith("hr-dead-")]
    assert letter.value == (value if letter.cut_bytes is None else b"")


@given(headers=header_lists, value=st.none() | st.binary(max_size=50), key=st.none() | st.binary(max_size=20))
def test_any_record_in_the_dead_topic_can_be_read(headers: Headers, value: bytes | None, key: bytes | None) -> None:
    letter = read(record(value, headers, key))
    assert not any(name.startswith("hr-dead-") for name, _ in letter.headers)
    assert 0 <= letter.at_ms < 253_402_300_800_000
    assert isinstance(letter.request_key + letter.key_text + letter.reason + letter.message, str)
    assert Filter().takes(letter)


@pytest.mark.parametrize(
    "value",
    [b'{"id": "a", "source": "s", "prompt": "x"}', b'{"id": "a", "n": "wrong"}', b'{"prompt": "x"}', b"{", b"", None],
)
def test_a_letter_has_the_key_under_which_its_outcome_is_stored(value: bytes | None) -> None:
    item = outcome(b"k", value, []).item
    Decoder(Settings()).decode(item)
    assert buried(value).request_key == item.key


def test_cut_letter_tells_its_request_by_the_publishers_header_and_claims_nothing_without() -> None:
    request = orjson.dumps({"id": "a", "source": "s", "prompt": "x" * LIMIT})
    key = identity.request_key("s", "a")
    letter = buried(request, [(Header.KEY, key.encode())])
    assert (letter.cut_bytes, letter.request_key, letter.unreadable) == (len(request), key, False)
    assert buried(request).request_key == ""


@pytest.mark.parametrize(
    ("value", "unreadable"), [(None, True), (b"", True), (b"{", True), (b"[]", True), (b"{}", False)]
)
def test_record_without_a_request_in_it_is_known_as_such(value: bytes | None, unreadable: bool) -> None:
    assert buried(value).unreadable is unreadable


def test_replay_takes_our_headers_and_a_passed_deadline_away_and_nothing_else() -> None:
    own: Headers = [("x", None), (Header.REPLY_TO, b"3"), ("x", b"2")]
    added: Headers = [(Header.DEADLINE_MS, b"%d" % (NOW_MS - 1)), (dead_letters.REASON, b"r")]
    assert to_replay(b"{}", own + added, NOW_MS) == (b"{}", own)
    ahead: Headers = [(Header.DEADLINE_MS, b"5"), (Header.DEADLINE_MS, b"%d" % (NOW_MS + 1))]
    assert to_replay(b"{}", ahead, NOW_MS) == (b"{}", ahead)
    behind: Headers = [(Header.DEADLINE_MS, b"%d" % (NOW_MS + 1)), (Header.DEADLINE_MS, b"5")]
    assert to_replay(b"{}", behind, NOW_MS) == (b"{}", [])


@given(
    fields=st.dictionaries(
        st.text(max_size=5).map("x".__add__),
        st.text(st.characters(codec=None, categories=None), max_size=9) | st.integers() | st.floats(-1e300, 1e300),
        max_size=5,
    ),
    ascii_only=st.booleans(),
)
def test_passed_deadline_in_the_payload_goes_and_every_other_field_stays(
    fields: dict[str, Any], ascii_only: bool
) -> None:
    request = fields | {"prompt": "x"}
    try:
        value = json.dumps(PASSED | request, ensure_ascii=ascii_only).encode()
    except UnicodeEncodeError:
        value = json.dumps(PASSED | request).encode()
    replayed, _ = to_replay(value, [], NOW_MS)
    assert replayed is not None
    assert json.loads(value) == PASSED | json.loads(replayed)


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        b"{ not json",
        b'{"prompt": "x",  "deadline": "2999-01-01T00:00:00Z"}',
        b'{"prompt": "x",  "deadline_ms": 5}',
        b'{"prompt": 1,  "deadline": "2020-01-01T00:00:00Z"}',
        b'{"prompt": "x", "deadline": "2020-01-01T00:00:00Z", "deep": ' + b"[" * 1_000 + b"]" * 1_000 + b"}",
    ],
)
def test_any_other_payload_goes_back_byte_by_byte(value: bytes | None) -> None:
    assert to_replay(value, [], NOW_MS) == (value, [])


@pytest.mark.parametrize(
    ("wanted", "takes"),
    [
        (Filter(reasons=frozenset({"engine_error", "other"})), True),
        (Filter(reasons=frozenset({"other"})), False),
        (Filter(topics=frozenset({"p.default.online.short"})), True),
        (Filter(topics=frozenset({"p.default.online"})), False),
        (Filter(ids=frozenset({"a"})), True),
        (Filter(ids=frozenset({"k"})), False),
        (Filter(keys=frozenset({"k"})), True),
        (Filter(keys=frozenset({identity.request_key("s", "a")})), True),
        (Filter(keys=frozenset({"a"})), False),
        (Filter(since_ms=2_000), True),
        (Filter(since_ms=2_001), False),
        (Filter(until_ms=2_001), True),
        (Filter(until_ms=2_000), False),
        (Filter(ids=frozenset({"a"}), reasons=frozenset({"other"})), False),
    ],
)
def test_filter_takes_what_meets_all_its_fields(wanted: Filter, takes: bool) -> None:
    assert wanted
    assert wanted.takes(buried(b'{"id": "a", "source": "s", "prompt": "x"}')) is takes


def test_filter_that_names_nothing_is_none() -> None:
    assert not Filter()
