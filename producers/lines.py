"""The one reader of JSONL: cut at line feeds only, memory bounded, errors by physical line.

A byte order mark at the start of the file, carriage returns before a line feed and blank lines are
tolerated. U+2028, U+2029, U+0085 and a lone carriage return are part of a line, as JSON allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from contract import messages
from contract.errors import InvalidRequest
from contract.messages import Request

MOST_LINE_BYTES = 64 * 2**20
_BOM = b"\xef\xbb\xbf"
_BLANK = b" \t\r"


def read_lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Each line that is not blank, with its number in the file, from 1. The last may lack its line feed.

    Raises ``InvalidRequest`` (``line_too_long``) instead of reading a line of more than ``MOST_LINE_BYTES``.
    """
    number = 0
    while line := stream.readline(MOST_LINE_BYTES + 1):
        number += 1
        if len(line) > MOST_LINE_BYTES:
            raise InvalidRequest(f"line {number}: longer than {MOST_LINE_BYTES} bytes", code="line_too_long")
        if number == 1:
            line = line.removeprefix(_BOM)
        line = line.removesuffix(b"\n").strip(_BLANK)
        if line:
            yield number, line


def parse_line(number: int, line: bytes) -> Request:
    """The request of one line. Raises ``InvalidRequest`` whose message begins with the line's number."""
    if line.startswith(_BOM):
        raise InvalidRequest(
            f"line {number}: begins with a byte order mark; only the first line of a file may",
            code="invalid_json_line",
        )
    request, error, _ = messages.parse_request(line)
    if error is not None:
        code = "invalid_json_line" if error.code in ("invalid_json", "not_an_object") else error.code
        raise InvalidRequest(f"line {number}: {error.message}", code=code, param=error.param)
    return request
