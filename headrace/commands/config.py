"""``headrace config show``: every setting, as a file that could be used as it is."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import click
import msgspec
import orjson

from contract import settings

MASK = "***"
_SECRET_NAME = re.compile(r"password|secret|api_key|token(?!iz)|jaas|\.pem$", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(://[^:/?#@]*:).*@")
_NAMED_PASSWORD = re.compile(r"(?i)(password\s*=\s*)('(?:[^'\\]|\\.)*'|[^&\s]*)")
_UNITS = (
    ("_usd_per_hour", "US dollars an hour"),
    ("_usd_per_million", "US dollars a million tokens"),
    ("_tokens_per_s", "tokens a second"),
    ("bytes_per_token", "bytes a token"),
    ("_ms_per_request", "milliseconds a request"),
    ("_bytes", "bytes"),
    ("_tokens", "tokens"),
    ("_requests", "requests"),
    ("_slots", "engine slots"),
    ("_hours", "hours"),
    ("_days", "days"),
    ("_ms", "milliseconds"),
    ("_s", "seconds"),
)


@click.group()
def command() -> None:
    """Settings: what they are, where they came from, what they mean."""


@command.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object per field, for programs.")
def show(as_json: bool) -> None:
    """Every field: value, where it came from, unit, bound and meaning. Secrets are masked."""
    tree, origins = settings.read(None, os.environ)
    rows = list(describe(settings.build(tree), origins))
    click.echo("\n".join(orjson.dumps(row).decode() for row in rows) if as_json else as_toml(rows))


def describe(current: settings.Settings, origins: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """One row per field: field, value (secrets masked), origin, unit, bound, meaning."""
    for field, value, meta in settings.fields(current):
        given = [where for name, where in origins.items() if name == field or name.startswith(f"{field}.")]
        yield {
            "field": field,
            "value": masked(field, value),
            "origin": ", ".join(dict.fromkeys(given)) or "default",
            "unit": next((unit for suffix, unit in _UNITS if field.endswith(suffix)), None),
            "bound": bound_of(meta),
            "meaning": meta.description,
        }


def bound_of(meta: msgspec.Meta) -> str | None:
    """The bound of a field in words; None when there is none."""
    choices = (meta.extra or {}).get("choices")
    limits = (("≥", meta.ge), (">", meta.gt), ("≤", meta.le), ("<", meta.lt))
    words = [f"{sign} {limit}" for sign, limit in limits if limit is not None]
    words += [f"one of {', '.join(choices)}"] if choices else []
    words += ["not empty"] if meta.min_length else []
    words += [f"at most {meta.max_length} characters"] if meta.max_length else []
    words += [f"matches {meta.pattern}"] if meta.pattern else []
    return ", ".join(words) or None


def masked(field: str, value: Any) -> Any:
    """``value`` without passwords: of a property whose name tells so, and within the database's URL."""
    if isinstance(value, dict):
        return {name: masked(name, item) for name, item in value.items()}
    if field == "postgres.url":
        return _NAMED_PASSWORD.sub(rf"\1{MASK}", _URL_PASSWORD.sub(rf"\1{MASK}@", value))
    return MASK if isinstance(value, str) and value and _SECRET_NAME.search(field) else value


def as_toml(rows: list[dict[str, Any]]) -> str:
    """The rows as a settings file: what each field means stands above it."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        tables.setdefault(row["field"].rpartition(".")[0], []).append(row)
    lines: list[str] = []
    for table, fields in tables.items():
        lines += ["", f"[{table}]"]
        for row in fields:
            facts = [
                row["meaning"],
                row["unit"] and f"Unit: {row['unit']}.",
                row["bound"] and f"Bound: {row['bound']}.",
            ]
            lines.append(f"# {' '.join(fact for fact in facts if fact)} From: {row['origin']}.")
            lines.append(f"{row['field'].rpartition('.')[2]} = {settings.toml(row['value'])}")
    return "\n".join(lines[1:])
