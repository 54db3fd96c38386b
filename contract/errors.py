"""The errors of headrace. Raise the branch; nobody tests message texts.

::

    HeadraceError
    ├── InvalidRequest      the request is wrong: an outcome at once, no retry
    ├── TransientError      may work if tried again: one retry, then the ladder
    ├── FatalError          stop taking work; nothing is dead-lettered
    │   ├── EngineDied      the engine (process) is gone or deaf
    │   ├── StorageDown     Postgres cannot be reached within the deadline
    │   └── Fenced          somebody declared this worker dead and took over its work
    └── SettingsError       a setting is wrong: names the field, the value and the fix
"""

from __future__ import annotations


class HeadraceError(Exception):
    """Base of all errors that headrace raises on purpose."""


class InvalidRequest(HeadraceError):
    """The request is wrong and stays wrong.

    ``code`` is a stable machine word, ``message`` tells a person what to change, ``param`` names
    the field of the request at fault (None: the request as a whole).
    """

    def __init__(self, message: str, *, code: str = "invalid_request", param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


class TransientError(HeadraceError):
    """Failed for a reason that is not the request's own; worth one more try."""

    def __init__(self, message: str, *, code: str = "transient") -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class FatalError(HeadraceError):
    """Something this process depends on is gone. Stop taking work; keep what is in hand."""


class EngineDied(FatalError):
    """The engine process is dead or no longer answers its round trip."""


class StorageDown(FatalError):
    """Postgres cannot be reached within the deadline."""


class Fenced(FatalError):
    """This worker's epoch was closed by another: it must not settle anything any more."""


class SettingsError(HeadraceError):
    """A setting is wrong. ``str()`` is one line that names the field, the value and the fix."""

    def __init__(self, field: str, value: object, fix: str) -> None:
        super().__init__(f"setting {field} = {value!r}: {fix}")
        self.field = field
        self.value = value
        self.fix = fix
