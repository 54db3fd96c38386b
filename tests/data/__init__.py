"""Input files of tests. ``field-cases`` holds small inputs that show faults seen in the field, named by case."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def field_case(name: str) -> Any:
    """A field case: the lines of a ``.jsonl`` file, or the value of a ``.json`` file.

    Read with Python's json: some hold what stricter parsers refuse.
    """
    text = (FOLDER / "field-cases" / name).read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()] if name.endswith(".jsonl") else json.loads(text)
