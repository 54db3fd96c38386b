"""Places between the steps of a request's life where a test lets a worker die for real.

Does nothing unless ``worker.crash_at`` names a point: ``after_engine`` or, from the third time on,
``after_engine:3``. Then the process kills itself with SIGKILL, as a lost machine would.
"""

from __future__ import annotations

import enum
import os
import signal


class Point(enum.StrEnum):
    """In the order in which a request passes them."""

    AFTER_CLAIM = "after_claim"
    BEFORE_ENGINE = "before_engine"
    AFTER_ENGINE = "after_engine"
    BEFORE_COMMIT = "before_commit"
    AFTER_COMMIT = "after_commit"
    BEFORE_PUBLISH = "before_publish"
    AFTER_PUBLISH = "after_publish"


class CrashPoint:
    """The one point, if any, at which this process dies."""

    __slots__ = ("_left", "_point")

    def __init__(self, spec: str = "") -> None:
        point, _, count = spec.partition(":")
        self._point = Point(point) if point else None
        self._left = int(count or 1)

    def reach(self, point: Point) -> None:
        """Called at each point, once per batch."""
        if point is self._point:
            self._left -= 1
            if self._left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
