"""Tokens of a request before any tokenizer of the engine has seen it.

A pool that names a tokenizer is counted exactly (the chat template's own tokens aside). Else bytes are
divided by a ratio that starts at ``bytes_per_token`` and follows the usage that results report.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from contract import messages
from contract.errors import SettingsError
from contract.messages import Request
from contract.settings import Settings

Count = Callable[[str], int]

_PRIOR_TOKENS = 2_000.0
"""Weight of the configured ratio: so many observed tokens count as much as the setting."""
_MEMORY_TOKENS = 200_000.0
"""Older observations fade once this many tokens were seen, so that a new model or language is followed."""
_LOWEST_RATIO, _HIGHEST_RATIO = 0.25, 64.0
_MESSAGE_TOKENS = 4
"""What a chat template adds to each message, roughly."""


class Ratio:
    """Bytes per token of one pool, learned as a ratio of sums. Pure but for its lock."""

    def __init__(self, start: float) -> None:
        self._lock = threading.Lock()
        self._bytes = start * _PRIOR_TOKENS
        self._tokens = _PRIOR_TOKENS
        self.value = start

    def observe(self, prompt_bytes: int, prompt_tokens: int) -> None:
        """One request's true size."""
        if prompt_bytes <= 0 or prompt_tokens <= 0:
            return
        with self._lock:
            self._bytes += prompt_bytes
            self._tokens += prompt_tokens
            if self._tokens > _MEMORY_TOKENS:
                faded = _MEMORY_TOKENS / self._tokens
                self._bytes *= faded
                self._tokens *= faded
            self.value = min(_HIGHEST_RATIO, max(_LOWEST_RATIO, self._bytes / self._tokens))


class Estimator:
    """Estimates for all pools. Any thread."""

    def __init__(self, settings: Settings) -> None:
        self._pools = settings.pools
        self._ratios = {name: Ratio(pool.bytes_per_token) for name, pool in settings.pools.items()}
        self._counts: dict[str, Count | None] = {}

    def prompt_tokens(self, pool: str, request: Request, prompt_bytes: int) -> int:
        """Tokens of the prompt. ``prompt_bytes`` is ``size_bytes(request)``.

        Raises ``SettingsError`` when the pool's tokenizer cannot be loaded.
        """
        if request.prompt_token_ids is not None:
            return len(request.prompt_token_ids)
        framing = _MESSAGE_TOKENS * len(request.messages or ())
        count = self._counts[pool] if pool in self._counts else self._load(pool)
        if count is not None:
            return framing + sum(count(text) for text in texts(request))
        return framing + math.ceil(prompt_bytes / self._ratios[pool].value)

    def observe(self, pool: str, prompt_bytes: int, prompt_tokens: int) -> None:
        """Learns from a result's usage: ``prompt_bytes`` as submitted, ``prompt_tokens`` as the engine counted."""
        self._ratios[pool].observe(prompt_bytes, prompt_tokens)

    def bytes_per_token(self, pool: str) -> float:
        """The present ratio."""
        return self._ratios[pool].value

    def _load(self, pool: str) -> Count | None:
        path = self._pools[pool].tokenizer
        self._counts[pool] = _tokenizer(pool, path) if path else None
        return self._counts[pool]


def _tokenizer(pool: str, path: str) -> Count:
    field = f"pools.{pool}.tokenizer"
    file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    try:
        import tokenizers  # loaded only where a pool asks for exact counts

        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except ImportError:
        raise SettingsError(field, path, "needs the package `tokenizers`; or leave it empty to estimate") from None
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise SettingsError(field, path, f"cannot be loaded from {file}: {error}") from None
    return lambda text: len(tokenizer.encode(messages.clean_surrogates(text), add_special_tokens=False).ids)


def size_bytes(request: Request) -> int:
    """Bytes of text in the prompt, tools and response schema included; 0 for token prompts."""
    return sum(len(text) if text.isascii() else len(text.encode("utf-8", "replace")) for text in texts(request))


def texts(request: Request) -> list[str]:
    """Every piece of text that becomes prompt tokens."""
    if request.input is not None:
        return [request.input]
    if request.prompt is not None:
        return [request.prompt]
    found = [text for message in request.messages or () for text in _message_texts(message)]
    if request.tools:
        found.append(orjson.dumps(request.tools).decode())
    return found


def _message_texts(message: dict[str, Any]) -> list[str]:
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    if isinstance(content, list):
        return [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return []
