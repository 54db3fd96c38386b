"""A wrong setting told so that its owner can mend it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from contract.errors import SettingsError
from contract.settings.sections import Settings, fields

_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `(?P<name>[^`]*)`")


def explain(error: msgspec.ValidationError, tree: Mapping[str, Any]) -> SettingsError:
    """``error`` about ``tree`` with field, value and fix; the nearest name for one that does not exist."""
    text = str(error)
    found = _PATH.search(text)
    path = _with_entry_names(found["path"], text, tree) if found else ""
    message = text[: found.start()] if found else text
    if unknown := _UNKNOWN.search(text):
        field = f"{path}.{unknown['name']}".lstrip(".")
        # Compared within its own table first: a class of the user's own has the fields of any class.
        known = {leaf.rpartition(".")[2]: leaf for leaf, _, _ in fields() if _same_table(leaf, path)}
        close = difflib.get_close_matches(unknown["name"], known, n=1)
        if close:
            fix = f"is not a setting; did you mean {path}.{close[0]}?"
        else:
            close = difflib.get_close_matches(
                field, [*Settings.__struct_fields__, *(leaf for leaf, _, _ in fields())], n=1
            )
            fix = (
                f"is not a setting; did you mean {close[0]}?" if close else "is not a setting; see headrace config show"
            )
        return SettingsError(field, _lookup(tree, field), fix)
    choices = next(((meta.extra or {}).get("choices") for leaf, _, meta in fields() if leaf == path), None)
    fix = f"must be one of {', '.join(choices)}" if choices else message.replace("`", "").replace("Expected", "must be")
    return SettingsError(path, _lookup(tree, path), fix)


def _with_entry_names(path: str, text: str, tree: Mapping[str, Any]) -> str:
    """``path`` with msgspec's ``[...]`` (some entry of a table of entries) replaced by the entry's name."""
    table, found, rest = path.partition("[...]")
    if not found:
        return path
    for name, entry in _lookup(tree, table).items():
        try:
            msgspec.convert(_replace(tree, table.split("."), {name: entry}), Settings, strict=False)
        except msgspec.ValidationError as error:
            if str(error) == text:
                return f"{table}.{name}{rest}"
    return path


def _replace(tree: Mapping[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    name, *rest = path
    return {**tree, name: _replace(tree[name], rest, value) if rest else value}


def _same_table(leaf: str, path: str) -> bool:
    table, _, _ = leaf.rpartition(".")
    if path.split(".")[0] in ("classes", "pools"):
        return table.split(".")[0::2] == path.split(".")[0::2] and table.count(".") == path.count(".")
    return table == path


def _lookup(tree: Any, path: str) -> Any:
    for part in path.replace("[", ".[").split("."):
        if isinstance(tree, list) and part.startswith("["):
            tree = tree[int(part.strip("[]"))]
        elif isinstance(tree, Mapping):
            tree = tree.get(part)
    return tree
