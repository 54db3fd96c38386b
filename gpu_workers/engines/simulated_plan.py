"""What the simulated engine will answer: text, tokens and faults, all from the request itself. Pure.

Rules, simple enough to predict in a test:

- A prompt token is 4 bytes of UTF-8, rounded up; a chat message costs 4 tokens more.
- An output token is one word. The first is a tag of 8 hex digits made from prompt, seed (unless the
  temperature is 0) and choice; the others come from a fixed book, from a place that the tag decides.
- A choice ends by itself ("stop") after 1 to 256 words, as the tag decides, else at ``max_tokens``
  ("length"); ``ignore_eos`` always goes on to ``max_tokens``.

Fault words in the prompt (obeyed when ``engine.simulated_faults`` is on):

==================================  =====================================================================
``FAULT:die``                       the engine dies when this request reaches it
``FAULT:die-once``                  the same, but only the first time this engine object meets the prompt
``FAULT:crash``                     the whole worker dies at once, as when memory runs out
``FAULT:hang``                      the core goes deaf: nothing ends, round trips do not come back
``FAULT:slow=MS``                   the answer comes MS milliseconds later
``FAULT:transient``                 every try fails with ``TransientError``
``FAULT:transient-once``            the first try of this prompt fails so, later ones are answered
``FAULT:invalid``                   the engine refuses it after hand-over (``InvalidRequest``)
``FAULT:nul``, ``FAULT:surrogate``  the text holds U+0000, half a surrogate pair (field case B14)
``FAULT:logprobs``                  -inf, +inf, NaN and missing among the log-probabilities (field case B20)
``FAULT:cached=N``                  N prompt tokens count as found in the prefix cache
==================================  =====================================================================
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
import random
import re
import zlib
from typing import Any

import msgspec

from contract.errors import InvalidRequest
from contract.messages import Request
from contract.money import Usage
from gpu_workers.engines import choices, rules

BYTES_PER_TOKEN = 4
TOKENS_PER_MESSAGE = 4
VOCABULARY = 50_000
_LONGEST_TALK = 256

_FAULT = re.compile(r"FAULT:(?P<word>[a-z-]+)(?:=(?P<number>\d+))?")
_FAULTS = {"crash", "die", "die-once", "hang", "slow", "transient", "transient-once", "invalid"}
_FAULTS |= {"nul", "surrogate", "logprobs", "cached"}
_SENTENCE = (
    "water runs down the race and turns a wheel that mills grain by day while at night gates close so ponds fill "
    "for morning each stone weighs more than it seems yet moves light as air when flow is even and never in haste"
)
_BOOK = [f" {word}" for word in random.Random(1).choices(_SENTENCE.split(), k=2_048)]
_OTHERS = sorted(set(_BOOK))
_PLACES = 1_024
_OFFSETS = list(itertools.accumulate(map(len, _BOOK), initial=0))
_BOOK_TEXT = "".join(_BOOK)


class Choice(msgspec.Struct):
    """One choice as it will be when nobody interferes."""

    tag: int
    tokens: int
    finish_reason: str
    text: str | None = None
    """Set when it is not simply the book's text: cut by a stop string, JSON, or a fault."""


class Plan(msgspec.Struct):
    """All there is to know about the answer to one request. The payload of ``Prepared``."""

    prompt_tokens: int
    chat: bool
    fingerprint: int
    choices: list[Choice]
    logprobs: int | None = None
    faults: dict[str, int] | None = None

    def answer(self) -> tuple[list[dict[str, Any]], Usage]:
        """The whole answer."""
        chat, logprobs = self.chat, self.logprobs
        answers, tokens = [], 0
        for index, one in enumerate(self.choices):
            text = one.text if one.text is not None else _talk(one.tag, one.tokens)
            entries = None if logprobs is None else self._logprobs(one, one.tokens)
            answers.append(
                choices.choice(chat=chat, index=index, text=text, finish_reason=one.finish_reason, logprobs=entries)
            )
            tokens += one.tokens
        return answers, self._usage(tokens)

    def cut(self, produced: list[int]) -> tuple[list[dict[str, Any]], Usage]:
        """What there is after ``produced`` tokens of each choice, when the request is cancelled."""
        rest = [
            one if tokens == one.tokens else Choice(one.tag, tokens, "abort")
            for one, tokens in zip(self.choices, produced, strict=True)
        ]
        return msgspec.structs.replace(self, choices=rest).answer()

    def _usage(self, output_tokens: int) -> Usage:
        cached = min(self.faults.get("cached", 0), self.prompt_tokens) if self.faults else 0
        return Usage(self.prompt_tokens, cached, output_tokens)

    def _logprobs(self, one: Choice, tokens: int) -> dict[str, Any]:
        draw = random.Random(one.tag)
        weird = itertools.cycle((-math.inf, math.inf, math.nan, None))
        entries = []
        for word in _words(one.tag, tokens):
            logprob: float | None = -draw.random()
            top: list[tuple[str, float | None]] = [(word, logprob)]
            top += [(other, -1.0 - draw.random()) for other in draw.sample(_OTHERS, k=20)]
            if self.faults and "logprobs" in self.faults:
                top = [(other, next(weird)) for other, _ in top]
                logprob = next(weird)
            entries.append(choices.TokenLogprob(word, logprob, top[: self.logprobs]))
        return choices.logprobs(entries, chat=self.chat)


def plan(
    request: Request, *, model: str, max_model_len: int, default_max_tokens: int, faults: bool
) -> tuple[Plan, int]:
    """The plan and the limit of output tokens per choice. Raises ``InvalidRequest`` as vLLM would."""
    rules.check(request, model)
    logprobs = rules.logprob_count(request)
    rules.token_bias(request, VOCABULARY)
    schema = rules.response_schema(request)
    if isinstance(schema, dict):
        text = "the simulated engine cannot follow a JSON schema; use json_object"
        raise InvalidRequest(text, code=rules.UNSUPPORTED, param="response_format")
    prompt, prompt_tokens = _measure(request)
    limit, least = rules.output_limits(request, prompt_tokens, max_model_len, default_max_tokens)
    fingerprint = zlib.crc32(prompt.encode("utf-8", "surrogatepass"))
    seed = request.seed if request.seed is not None and request.temperature >= 1e-5 else None
    found = _faults(prompt) if faults and "FAULT:" in prompt else None
    planned = []
    for index in range(request.n):
        tag = fingerprint if seed is None and index == 0 else zlib.crc32(f"{seed}/{index}".encode(), fingerprint)
        one = _choice(request, tag, limit, least)
        if schema is not None:
            _as_json(one, limit)
        if found:
            _disturb(one, found)
        planned.append(one)
    return Plan(prompt_tokens, rules.is_chat(request), fingerprint, planned, logprobs, found), limit


def _measure(request: Request) -> tuple[str, int]:
    """The prompt as one text, and its tokens."""
    if request.prompt_token_ids is not None:
        rules.check_token_ids(request.prompt_token_ids, VOCABULARY, "prompt_token_ids")
        return " ".join(map(str, request.prompt_token_ids)), len(request.prompt_token_ids)
    if request.prompt is not None:
        return request.prompt, _tokens(request.prompt)
    messages = rules.chat_messages(request)
    text = "\n".join(f"{message['role']}: {message['content']}" for message in messages)
    return text, sum(TOKENS_PER_MESSAGE + _tokens(message["content"]) for message in messages)


def _tokens(text: str) -> int:
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    return -(-size // BYTES_PER_TOKEN)


def _choice(request: Request, tag: int, limit: int, least: int) -> Choice:
    wanted = max(tag % _LONGEST_TALK + 1, least)
    one = Choice(tag, limit, "length") if request.ignore_eos or wanted > limit else Choice(tag, wanted, "stop")
    if request.stop:
        _stop_early(one, request.stops, least)
    return one


def _stop_early(one: Choice, stops: list[str], least: int) -> None:
    """Cuts the choice before the first stop string that is complete after ``least`` tokens."""
    text = _talk(one.tag, one.tokens)
    ends = list(itertools.accumulate(map(len, _words(one.tag, one.tokens))))
    earliest = ends[least - 1] + 1 if least else 0
    places = [(text.find(stop, max(0, earliest - len(stop))), len(stop)) for stop in stops]
    found = [(place + length, place) for place, length in places if place >= 0]
    if found:
        end, place = min(found)
        one.tokens, one.text, one.finish_reason = bisect.bisect_left(ends, end) + 1, text[:place], "stop"


def _as_json(one: Choice, limit: int) -> None:
    """Wraps the words as a JSON object: two tokens open and close it. Too little room cuts it, as in any engine."""
    one.tokens = min(one.tokens + 2, limit)
    if one.tokens > 2:
        one.text, one.finish_reason = json.dumps({"answer": _talk(one.tag, one.tokens - 2)}), "stop"
    else:
        one.text, one.finish_reason = '{"answer"'[: one.tokens], "length"


def _faults(prompt: str) -> dict[str, int] | None:
    found = {match["word"]: int(match["number"] or 0) for match in _FAULT.finditer(prompt)}
    unknown = found.keys() - _FAULTS
    if unknown:
        raise InvalidRequest(f"no such fault: {', '.join(sorted(unknown))}; there are {', '.join(sorted(_FAULTS))}")
    return found or None


def _disturb(one: Choice, faults: dict[str, int]) -> None:
    if "nul" in faults:
        one.text = (one.text or _talk(one.tag, one.tokens)) + "\0"
    if "surrogate" in faults:
        one.text = (one.text or _talk(one.tag, one.tokens)) + "\ud83d"


def _words(tag: int, tokens: int) -> list[str]:
    start = tag % _PLACES
    book = [_BOOK[(start + index) % len(_BOOK)] for index in range(tokens - 1)]
    return [f"{tag:08x}", *book] if tokens else []


def _talk(tag: int, tokens: int) -> str:
    """The text of the first ``tokens`` words: ``"".join(_words(tag, tokens))``, by slices of the book."""
    if tokens <= 0:
        return ""
    start = tag % _PLACES
    end = start + tokens - 1
    if end <= len(_BOOK):
        return f"{tag:08x}{_BOOK_TEXT[_OFFSETS[start] : _OFFSETS[end]]}"
    rounds, rest = divmod(end - len(_BOOK), len(_BOOK))
    return f"{tag:08x}{_BOOK_TEXT[_OFFSETS[start] :]}{_BOOK_TEXT * rounds}{_BOOK_TEXT[: _OFFSETS[rest]]}"
