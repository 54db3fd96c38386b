"""Makes requests ready for an endpoint: OpenAI's form, under OpenAI's names. Pure but for a tokenizer's file.

A dialect says what the endpoint understands. ``vllm``: its sampling parameters beyond OpenAI's as well, all
of them written out, so that a model's own defaults decide nothing. ``openai``: those only where the
request asks for them, and the endpoint may refuse.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import orjson

from contract.errors import FatalError, InvalidRequest
from contract.messages import Request
from contract.settings import Pool
from gpu_workers.engine import Prepared
from gpu_workers.engines import rules

Dialect = Literal["vllm", "openai"]

CHAT = "chat/completions"
COMPLETIONS = "completions"
_TOKENS_PER_MESSAGE = 4
"""What a chat template adds to each message, roughly."""
_ANY_TOKEN = 10**11
"""The endpoint alone knows its vocabulary."""


@dataclasses.dataclass(slots=True)
class Payload:
    """What is sent, and what the answer's shape depends on."""

    path: str
    body: bytes
    """A JSON object, not empty, so that a field can be put at its end."""
    field: str
    """The request's field that carries the prompt."""
    schema: bool = False
    """The answer must follow a JSON schema."""

    @property
    def chat(self) -> bool:
        return self.path == CHAT

    def with_priority(self, priority: int) -> bytes:
        """The body for an endpoint that knows priorities: lower is served first."""
        return b'%b,"priority":%d}' % (self.body[:-1], priority)


class Preparer:
    """Implements ``Engine.prepare``. Any thread; ``dialect``, ``paths`` and ``max_model_len`` may be set anew.

    Prompts given as tokens are counted; texts are too where the pool names its tokenizer, else estimated
    from bytes. What is counted is held to the context's room here. An estimate refuses nobody and cuts nothing:
    the endpoint knows.
    """

    def __init__(self, pool: Pool, *, model: str, max_model_len: int) -> None:
        self._pool = pool
        self._name_there = model
        self.max_model_len = max_model_len
        self.dialect: Dialect = "openai"
        self.paths: tuple[str, ...] = (CHAT, COMPLETIONS)
        """Which forms the endpoint serves."""
        self._count = _tokenizer(pool.tokenizer) if pool.tokenizer else None

    def prepare(self, requests: Sequence[Request]) -> list[Prepared | InvalidRequest]:
        """One entry per request, in order."""
        return [self._guarded(request) for request in requests]

    def _guarded(self, request: Request) -> Prepared | InvalidRequest:
        try:
            return self._prepare(request)
        except InvalidRequest as error:
            return error
        except (TypeError, ValueError) as error:  # half a surrogate pair, a number beyond 64 bit
            return InvalidRequest(f"it cannot be written as JSON: {error}", param=rules.prompt_field(request))

    def _prepare(self, request: Request) -> Prepared:
        rules.check(request, self._pool.model)
        path = CHAT if rules.is_chat(request) else COMPLETIONS
        field = rules.prompt_field(request)
        if path not in self.paths:
            text = f"this pool's endpoint has no /{path}; send {'prompt' if path == CHAT else 'input or messages'}"
            raise InvalidRequest(text, code=rules.UNSUPPORTED, param=field)
        prompt = _prompt(request)
        tokens, exact = self._measure(prompt)
        known = tokens if exact or not tokens else 1
        limit, least = rules.output_limits(request, known, self.max_model_len, self._pool.default_max_tokens)
        tokens = min(tokens, self.max_model_len - 1)
        body = {"model": self._name_there, **prompt, "max_tokens": limit, **self._sampling(request, path, least)}
        schema = isinstance(rules.response_schema(request), dict)
        payload = Payload(path, orjson.dumps(body), field, schema)
        return Prepared(request, tokens, min(limit, self.max_model_len - tokens), payload)

    def _measure(self, prompt: dict[str, Any]) -> tuple[int, bool]:
        """Tokens of the prompt, and whether they were counted (a chat template's own are always estimated)."""
        given = prompt.get("prompt")
        if isinstance(given, list):
            return len(given), True
        texts = [given] if isinstance(given, str) else [message["content"] for message in prompt["messages"]]
        framing = _TOKENS_PER_MESSAGE * len(texts) if given is None else 0
        if self._count is not None:
            return framing + sum(map(self._count, texts)), given is not None
        size = sum(len(text.encode("utf-8", "replace")) for text in texts)
        return framing + math.ceil(size / self._pool.bytes_per_token), False

    def _sampling(self, request: Request, path: str, min_tokens: int) -> dict[str, Any]:
        logprobs = rules.logprob_count(request)
        rules.token_bias(request, _ANY_TOKEN)
        fields: dict[str, Any] = {"temperature": request.temperature, "top_p": request.top_p}
        if request.n > 1:
            fields["n"] = request.n
        if request.stops:
            fields["stop"] = request.stops
        if request.seed is not None:
            fields["seed"] = request.seed
        if request.logit_bias:
            fields["logit_bias"] = request.logit_bias
        if rules.response_schema(request) is not None:
            fields["response_format"] = request.response_format
        if logprobs is not None:
            fields |= {"logprobs": True, "top_logprobs": logprobs} if path == CHAT else {"logprobs": logprobs}
        always = self.dialect == "vllm"
        for name, value, default in (
            ("presence_penalty", request.presence_penalty, 0.0),
            ("frequency_penalty", request.frequency_penalty, 0.0),
            ("top_k", request.top_k, 0),
            ("min_p", request.min_p, 0.0),
            ("repetition_penalty", request.repetition_penalty, 1.0),
            ("ignore_eos", request.ignore_eos, False),
            ("min_tokens", min_tokens, 0),
        ):
            if always or value != default:
                fields[name] = value
        return fields


def _prompt(request: Request) -> dict[str, Any]:
    if request.prompt_token_ids is not None:
        rules.check_token_ids(request.prompt_token_ids, _ANY_TOKEN, "prompt_token_ids")
        return {"prompt": request.prompt_token_ids}
    if request.prompt is not None:
        return {"prompt": request.prompt}
    return {"messages": rules.chat_messages(request)}


def _tokenizer(path: str) -> Callable[[str], int]:
    file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    try:
        import tokenizers  # only where a pool asks for exact counts

        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise FatalError(f"the pool's tokenizer = {path!r} cannot be loaded: {error}") from error
    return lambda text: len(tokenizer.encode(text).ids)
