"""The plain row that FastStream and Quix Streams write for each request: eight columns of it, no bookkeeping.

``INSERT`` needs the key that keeps a record that comes twice from being two rows. ``COPY`` is faster, has no such
key, and doubles the rows of every redelivery.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_COLUMNS = "id, source, business_line, type, status, prompt_tokens, output_tokens, output"
INSERT = f"INSERT INTO answers ({_COLUMNS}) VALUES (%s, %s, %s, %s, %s, %s, %s, %s) ON CONFLICT (id) DO NOTHING"
COPY = f"COPY answers ({_COLUMNS}) FROM STDIN"
_OUTPUT = json.dumps({"choices": [{"index": 0, "text": "night gates close so ponds fill for morning"}]})


def row(request: Mapping[str, Any]) -> tuple[Any, ...]:
    """The answer to one request."""
    prompt_tokens = len(request["prompt"]) // 4
    return (
        request["id"],
        request["source"],
        request["business_line"],
        request["type"],
        "ok",
        prompt_tokens,
        request["max_tokens"],
        _OUTPUT,
    )
