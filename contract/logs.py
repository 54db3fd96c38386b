"""Structured logging: one event a line, with time, level, event and fields. Never prompts or keys.

Control characters in values are escaped by the JSON writer, so a request cannot forge a line.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO

import orjson
import structlog

from contract.messages import clean_json
from contract.settings import Log

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure(log: Log, stream: TextIO | None = None, **context: Any) -> None:
    """Sets up structlog for this process. ``context`` (worker, pool) stands on every line."""
    renderers: list[Any]
    if log.format == "json":
        renderers = [structlog.processors.JSONRenderer(serializer=_dumps)]
    else:
        renderers = [_printable, structlog.dev.ConsoleRenderer(colors=(stream or sys.stderr).isatty())]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            lambda _, __, event: {**context, **event},
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[log.level]),
        logger_factory=structlog.PrintLoggerFactory(stream or sys.stderr),
        cache_logger_on_first_use=True,
    )


def _dumps(event: dict[str, Any], **_: Any) -> str:
    try:
        return orjson.dumps(event, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:
        # A lone surrogate or an integer beyond 64 bits: no value may make a log line raise.
        return json.dumps(clean_json(event)[0], default=str)


def _printable(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """For people's terminals: what would move the cursor or end the line is shown escaped. A traceback stays."""
    for name, value in event.items():
        if isinstance(value, str) and name != "exception" and not value.isprintable():
            event[name] = repr(value)
    return event


def get(room: str) -> Any:
    """A logger bound to a room's name. Where nobody configured structlog, lines go to stderr, never to stdout."""
    if not structlog.is_configured():
        structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))
    return structlog.get_logger(room=room)
