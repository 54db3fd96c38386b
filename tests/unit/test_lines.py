"""The reader of JSONL files."""

from __future__ import annotations

import io
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import InvalidRequest
from producers import lines

CASES = Path(__file__).parents[1] / "data" / "field-cases"


def read(data: bytes) -> list[tuple[int, bytes]]:
    return list(lines.read_lines(io.BytesIO(data)))


def test_mark_carriage_returns_and_blank_lines_are_tolerated_and_numbers_are_physical() -> None:
    found = read((CASES / "B01-bom-crlf-blank.jsonl").read_bytes())
    assert [number for number, _ in found] == [1, 3, 5, 7]
    assert [orjson.loads(line)["custom_id"] for _, line in found] == ["b01-1", "b01-2", "b01-3", "b01-4"]


def test_mark_within_a_file_is_named_with_its_line() -> None:
    found = read((CASES / "B01-bom-on-third-line.jsonl").read_bytes())
    assert [number for number, _ in found] == [1, 2, 3, 4]
    with pytest.raises(InvalidRequest, match=r"line 3: .*byte order mark") as caught:
        lines.parse_line(*found[2])
    assert caught.value.code == "invalid_json_line"


def test_only_line_feeds_cut() -> None:
    found = read((CASES / "B02-unicode-separators.jsonl").read_bytes())
    assert len(found) == 4
    for _, line in found:
        orjson.loads(line)


def test_every_line_that_is_no_request_is_refused_by_number() -> None:
    found = dict(read((CASES / "B04-not-objects.jsonl").read_bytes()))
    for number in range(2, 17):
        with pytest.raises(InvalidRequest, match=f"^line {number}: "):
            lines.parse_line(number, found[number])


@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=20), max_size=12), st.booleans()
)
def test_lines_survive_whatever_characters_they_hold(texts: list[str], last_feed: bool) -> None:
    written = [orjson.dumps({"input": text}) for text in texts]
    data = b"\n".join(written) + (b"\n" if last_feed and written else b"")
    found = [lines.parse_line(number, line) for number, line in read(data)]
    assert [request.input for request in found] == texts


def test_line_without_end_is_refused_before_it_fills_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MOST_LINE_BYTES", 100)
    assert read(b"x" * 99 + b"\ny")[0] == (1, b"x" * 99)
    with pytest.raises(InvalidRequest, match="line 2") as caught:
        read(b"a\n" + b"x" * 101)
    assert caught.value.code == "line_too_long"
