"""The OpenAI shape of an answer's choices, the same for every engine. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from contract.messages import json_logprob


class TokenLogprob(NamedTuple):
    """A generated token, its log-probability, and the likeliest ones in its place (which may include it)."""

    token: str
    logprob: float | None
    top: list[tuple[str, float | None]]


def choice(*, chat: bool, index: int, text: str, finish_reason: str | None, logprobs: Any = None) -> dict[str, Any]:
    """One choice. ``chat`` decides between ``message`` and ``text``."""
    if chat:
        message = {"role": "assistant", "content": text}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def logprobs(entries: Iterable[TokenLogprob], *, chat: bool) -> dict[str, Any]:
    """The ``logprobs`` of one choice, every number one that JSON can write (``contract.messages.json_logprob``)."""
    return _chat(entries) if chat else _completion(entries)


def _chat(entries: Iterable[TokenLogprob]) -> dict[str, Any]:
    content = []
    for token, logprob, top in entries:
        entry = _chat_entry(token, logprob)
        entry["top_logprobs"] = [_chat_entry(*one) for one in top]
        content.append(entry)
    return {"content": content}


def _chat_entry(token: str, logprob: float | None) -> dict[str, Any]:
    return {"token": token, "logprob": json_logprob(logprob), "bytes": list(token.encode("utf-8", "replace"))}


def _completion(entries: Iterable[TokenLogprob]) -> dict[str, Any]:
    tokens, values, tops, offsets = [], [], [], []
    offset = 0
    for token, logprob, top in entries:
        tokens.append(token)
        values.append(json_logprob(logprob))
        tops.append({other: json_logprob(value) for other, value in top})
        offsets.append(offset)
        offset += len(token)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}
