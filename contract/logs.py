"""Structured logging: one event a line, with time, level, event and fields. Never prompts or keys.

Control characters in values are escaped by the JSON writer, so a request cannot forge a line.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

import orjson
import structlog

from contract.settings import Log

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure(log: Log, stream: TextIO | None = None, **context: Any) -> None:
    """Sets up structlog for this process. ``context`` (worker, pool) stands on every line."""
    renderer: Any = (
        structlog.processors.JSONRenderer(serializer=_dumps)
        if log.format == "json"
        else structlog.dev.ConsoleRenderer(colors=(stream or sys.stderr).isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            lambda _, __, event: {**context, **event},
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[log.level]),
        logger_factory=structlog.PrintLoggerFactory(stream or sys.stderr),
        cache_logger_on_first_use=True,
    )


def _dumps(event: dict[str, Any], **_: Any) -> str:
    return orjson.dumps(event, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


def get(room: str) -> Any:
    """A logger bound to a room's name."""
    return structlog.get_logger(room=room)
