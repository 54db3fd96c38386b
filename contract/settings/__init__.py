"""All settings, frozen after load. One table per section.

One file, ``headrace.toml``, plus the environment: ``HEADRACE_<SECTION>__<FIELD>``, deeper tables by
further ``__`` (``HEADRACE_CLASSES__ONLINE__WINDOW__MAX_WAIT_MS=20``). The environment is read here and
nowhere else. ``headrace config show`` prints every field with its value, where that came from, its bound
and its meaning. In reading order: ``sections`` (what there is), ``loading``, ``rules``, ``explaining``, ``writing``.
"""

from contract.settings.loading import DEFAULT_FILE, ENV_PREFIX, build, load, read
from contract.settings.sections import (
    Buckets,
    Client,
    Cost,
    Engine,
    Kafka,
    Log,
    Pool,
    Postgres,
    PriorityClass,
    Settings,
    Topics,
    Window,
    Worker,
    fields,
)
from contract.settings.writing import environment, toml

__all__ = [
    "DEFAULT_FILE",
    "ENV_PREFIX",
    "Buckets",
    "Client",
    "Cost",
    "Engine",
    "Kafka",
    "Log",
    "Pool",
    "Postgres",
    "PriorityClass",
    "Settings",
    "Topics",
    "Window",
    "Worker",
    "build",
    "environment",
    "fields",
    "load",
    "read",
    "toml",
]
