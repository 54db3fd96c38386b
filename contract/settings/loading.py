"""Settings from file and environment."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from contract.errors import SettingsError
from contract.settings.explaining import explain
from contract.settings.rules import check_rules
from contract.settings.sections import Settings, default_classes

ENV_PREFIX = "HEADRACE_"
DEFAULT_FILE = "headrace.toml"


def load(file: str | os.PathLike[str] | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from ``file`` (default: ``$HEADRACE_CONFIG``, else ``headrace.toml`` if there) and environment.

    Raises ``SettingsError`` that names the field, the value and the fix.
    """
    env = os.environ if environ is None else environ
    return build(read(file, env)[0])


def read(file: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The raw tree of settings given, and for each dotted field where it came from."""
    named = file or environ.get(f"{ENV_PREFIX}CONFIG")
    path = Path(named or DEFAULT_FILE)
    tree: dict[str, Any] = {}
    if named or path.exists():
        try:
            tree = tomllib.loads(path.read_text("utf-8-sig"))
        except OSError as error:
            raise SettingsError("config file", str(path), f"cannot be read: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SettingsError("config file", str(path), f"is not TOML: {error}") from error
    origins = {field: str(path) for field, _ in _leaves(tree)}
    for name, value in environ.items():
        if not name.startswith(ENV_PREFIX) or "__" not in name:
            continue
        *tables, leaf = name[len(ENV_PREFIX) :].lower().split("__")
        node = tree
        for table in tables:
            node = node.setdefault(table, {})
            if not isinstance(node, dict):
                raise SettingsError(name, value, f"{table} is not a table")
        node[leaf] = _from_env(value)
        origins[".".join([*tables, leaf])] = f"${name}"
    return tree, origins


def build(tree: Mapping[str, Any]) -> Settings:
    """Settings from a raw tree. Named entries of ``classes`` and ``pools`` overlay the defaults."""
    try:
        tree = _with_default_classes(tree)
        settings = msgspec.convert(tree, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise explain(error, tree) from None
    check_rules(settings)
    return settings


def _with_default_classes(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A file that sets one field of class ``online`` keeps the other defaults of that class."""
    merged = dict(tree)
    classes = merged.get("classes")
    if isinstance(classes, dict):
        defaults = msgspec.to_builtins(default_classes())
        merged["classes"] = {
            name: _overlay(defaults[name], given) if name in defaults and isinstance(given, dict) else given
            for name, given in classes.items()
        }
        if not any(isinstance(given, dict) and "rank" in given for given in classes.values()):
            merged["classes"] = defaults | merged["classes"]
    return merged


def _overlay(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in over.items():
        old = merged.get(name)
        merged[name] = _overlay(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _from_env(value: str) -> Any:
    """Tables and lists are given as TOML; everything else stays text and is converted by its field's type."""
    if value[:1] in ("{", "["):
        try:
            return tomllib.loads(f"v = {value}")["v"]
        except tomllib.TOMLDecodeError:
            return value
    return value


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
