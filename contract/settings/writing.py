"""Settings written down: for a child process, for a file."""

from __future__ import annotations

import json
from typing import Any

from contract.settings.loading import ENV_PREFIX
from contract.settings.sections import Settings, fields


def environment(settings: Settings) -> dict[str, str]:
    """The environment that gives a child process these settings: ``load(None, environment(s)) == s``.

    Fields at their defaults are left out, unless they belong to a changed set of classes or pools.
    """
    default = Settings()
    defaults = {name: value for name, value, _ in fields(default)}
    changed = [table for table in ("classes", "pools") if getattr(settings, table) != getattr(default, table)]
    return {
        ENV_PREFIX + name.upper().replace(".", "__"): value if isinstance(value, str) else toml(value)
        for name, value, _ in fields(settings)
        if name.partition(".")[0] in changed or defaults.get(name, ...) != value
    }


def toml(value: Any) -> str:
    """A setting's value as TOML writes it, on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {toml(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(toml(item) for item in value) + "]"
    # Of text, numbers and truth, TOML's form is JSON's.
    return json.dumps(value, ensure_ascii=False)
