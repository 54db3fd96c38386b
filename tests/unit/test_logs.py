"""One event is one line, whatever its values hold."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from contract import logs
from contract.settings import Log


@pytest.fixture(autouse=True)
def _structlog_as_before() -> Iterator[None]:
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def written(log: Log, event: str, **fields: Any) -> str:
    stream = io.StringIO()
    logs.configure(log, stream, worker="w-1")
    structlog.get_logger(room="tests").warning(event, **fields)
    return stream.getvalue()


@pytest.mark.parametrize(
    "forged",
    [
        'ok\n{"event":"forged"}',
        "a\r\nb",
        "a\rb",
        "a\x85b\u2028c\u2029d\x0b\x0c\x1c",
        "\x1b[2K\x1b[1Ahidden",
        "nul \0",
        "cut \ud83d",
    ],
)
@pytest.mark.parametrize("format_", ["json", "console"])
def test_value_cannot_forge_a_line(forged: str, format_: Any) -> None:
    text = written(Log(format=format_), "settled", error=forged, other={"deep": [forged]})
    assert text.endswith("\n")
    assert text.count("\n") == 1
    assert "\r" not in text
    assert "\x1b[2K" not in text
    text.encode()


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda name: name != "event"),
        st.text() | st.integers() | st.floats() | st.binary() | st.none(),
    )
)
def test_any_fields_give_one_json_object(fields: dict[str, Any]) -> None:
    stream = io.StringIO()
    logs.configure(Log(), stream)
    logger = structlog.get_logger()
    for reserved in ("level", "timestamp", "exc_info", "stack_info", "self", "event"):
        fields.pop(reserved, None)
    logger.warning("settled", **fields)
    (line,) = stream.getvalue().split("\n")[:-1]
    assert orjson.loads(line)["event"] == "settled"


def test_line_has_time_level_event_context_and_fields() -> None:
    event = orjson.loads(written(Log(), "settled", count=3))
    assert event.pop("timestamp").endswith("Z")
    assert event == {"event": "settled", "level": "warning", "worker": "w-1", "room": "tests", "count": 3}


def test_exception_is_one_line_too() -> None:
    stream = io.StringIO()
    logs.configure(Log(), stream)
    try:
        raise ValueError("two\nlines")
    except ValueError:
        structlog.get_logger().exception("failed")
    (line,) = stream.getvalue().split("\n")[:-1]
    assert "ValueError: two\nlines" in orjson.loads(line)["exception"]


def test_level_below_the_setting_is_not_written() -> None:
    assert written(Log(level="error"), "settled") == ""


def test_library_in_a_program_without_logging_set_up_never_writes_to_stdout() -> None:
    script = "from contract import logs; logs.get('broker').warning('down', broker='b')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == ""
    assert "down" in done.stderr
