"""What our engines accept and how they refuse: one place, so that the simulated and the real one agree. Pure.

Each function raises ``InvalidRequest`` that names the field and says what to change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import orjson

from contract.errors import InvalidRequest
from contract.messages import Request

UNSUPPORTED = "unsupported_parameter"
CONTEXT_LENGTH = "context_length_exceeded"

_NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (None, True),
    "add_special_tokens": (None,),
    "allowed_token_ids": (None,),
    "audio": (None,),
    "bad_words": (None, []),
    "best_of": (None, 1),
    "cache_salt": (None,),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "early_stopping": (None, False),
    "echo": (None, False),
    "function_call": (None, "none"),
    "functions": (None, []),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "include_stop_str_in_output": (None, False),
    "length_penalty": (None, 1, 1.0),
    "logits_processors": (None, []),
    "lora_request": (None,),
    "max_completion_tokens": (None,),
    "modalities": (None, ["text"]),
    "priority": (None, 0),
    "prompt_logprobs": (None,),
    "request_id": (None,),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "stop_token_ids": (None, []),
    "stream": (None, False),
    "structural_tag": (None,),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
}
"""Parameters of OpenAI's and vLLM's servers that would change the answer and that we do not pass on, with the values
that ask for nothing. Leaving one out in silence would answer another question than was asked."""
_INSTEAD = {
    "max_completion_tokens": "max_tokens",
    "request_id": "id",
    "priority": "a topic of another class",
    "lora_request": "model, or a pool of its own for the adapter",
    "functions": "messages that describe them",
} | dict.fromkeys(("structured_outputs", "guided_json"), "response_format with a JSON schema")

SCHEMA_BYTES = 65_536
"""Largest JSON schema. What it takes to compile one grows with its size, and compilers take turns."""
SCHEMA_ITEMS = 10_000
"""Largest ``minItems`` or ``maxItems``: a compiler writes each out, for seconds from 100,000 on."""


def check(request: Request, model: str) -> None:
    """What can be judged before anything is tokenised."""
    if request.model is not None and request.model != model:
        text = f"this pool serves {model!r}, not {request.model!r}; leave model out or publish to its pool"
        raise InvalidRequest(text, code="model_not_found", param="model")
    if request.extra:
        _check_extra(request.extra)
    if request.tools and request.tool_choice != "none":
        text = 'tools are not supported by this engine; leave tools out or set tool_choice to "none"'
        raise InvalidRequest(text, code=UNSUPPORTED, param="tools")
    if not request.tools and request.tool_choice not in (None, "none", "auto"):
        raise InvalidRequest("tool_choice asks for a tool, but tools are not supported", param="tool_choice")
    if request.n > 1 and request.temperature < 1e-5:
        raise InvalidRequest(f"n must be 1 at temperature 0 (all choices would be equal), got {request.n}", param="n")
    if request.max_tokens is not None and request.min_tokens > request.max_tokens:
        text = f"min_tokens must be at most max_tokens = {request.max_tokens}, got {request.min_tokens}"
        raise InvalidRequest(text, param="min_tokens")


def _check_extra(extra: dict[str, Any]) -> None:
    for name in sorted(_NOT_SERVED.keys() & extra.keys()):
        value = extra[name]
        if not any(type(value) is type(neutral) and value == neutral for neutral in _NOT_SERVED[name]):
            instead = f"; use {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise InvalidRequest(f"{name} is not supported{instead or ': leave it out'}", code=UNSUPPORTED, param=name)


def is_chat(request: Request) -> bool:
    """Whether choices carry a ``message`` (else ``text``)."""
    return request.input is not None or request.messages is not None


def chat_messages(request: Request) -> list[dict[str, Any]]:
    """The messages of a chat request, content as text: lists of text parts are joined by newlines."""
    if request.input is not None:
        return [{"role": "user", "content": request.input}]
    return [
        message if type(message.get("content")) is str else {**message, "content": _text(message.get("content"), index)}
        for index, message in enumerate(request.messages or ())
    ]


def _text(content: Any, index: int) -> str:
    param = f"messages[{index}].content"
    if content is None:
        return ""
    if not isinstance(content, list):
        raise InvalidRequest("content must be a string or a list of text parts", param=param)
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise InvalidRequest(f"only text parts are supported, got {kind!r}", code=UNSUPPORTED, param=param)
        texts.append(part["text"])
    return "\n".join(texts)


def logprob_count(request: Request) -> int | None:
    """How many alternatives per token are wanted beside the chosen one; None: no log-probabilities.

    ``true`` is the chat form (``top_logprobs`` says how many, 0 if absent), a number the form of completions.
    """
    wanted = request.logprobs
    if wanted is None or wanted is False:
        if request.top_logprobs is not None:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        return None
    if wanted is True:
        return request.top_logprobs or 0
    return wanted


def response_schema(request: Request) -> dict[str, Any] | str | None:
    """None: free text. ``"json_object"``: any JSON object. A dict: the JSON schema to follow."""
    wanted = request.response_format
    if wanted is None:
        return None
    kind = wanted.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return "json_object"
    if kind == "json_schema":
        holder = wanted.get("json_schema")
        schema = holder.get("schema") if isinstance(holder, dict) else None
        if not isinstance(schema, dict):
            text = "json_schema needs the schema as an object under json_schema.schema"
            raise InvalidRequest(text, param="response_format.json_schema")
        _check_size(schema)
        return schema
    text = f"type must be text, json_object or json_schema, got {kind!r}"
    raise InvalidRequest(text, code=UNSUPPORTED, param="response_format")


def no_answer_follows() -> InvalidRequest:
    """For a schema that refers to itself without end, say: an engine that keeps to it must end before it begins."""
    return InvalidRequest("no answer can follow the JSON schema", param="response_format")


def _check_size(schema: dict[str, Any]) -> None:
    """What no compiler should be asked for, judged without one."""
    param = "response_format"
    try:
        size = len(orjson.dumps(schema))
    except TypeError as error:  # nested too deep
        raise InvalidRequest(f"the schema cannot be written as JSON: {error}", param=param) from error
    if size > SCHEMA_BYTES:
        raise InvalidRequest(f"a schema may have {SCHEMA_BYTES} bytes, this one has {size}", param=param)
    left: list[Any] = [schema]
    while left:
        node = left.pop()
        if isinstance(node, dict):
            for name in ("minItems", "maxItems"):
                if isinstance(count := node.get(name), (int, float)) and count > SCHEMA_ITEMS:
                    raise InvalidRequest(f"{name} may be at most {SCHEMA_ITEMS}, got {count!r}", param=param)
            left += node.values()
        elif isinstance(node, list):
            left += node
        elif isinstance(node, str) and "\0" in node:
            raise InvalidRequest("a schema may not hold U+0000: no answer could follow it", param=param)


def output_limits(request: Request, prompt_tokens: int, max_model_len: int, default_max_tokens: int) -> tuple[int, int]:
    """(max_tokens, min_tokens) per choice, cut to the room that the prompt leaves in the context.

    A prompt that leaves no room for one token is refused; a ``max_tokens`` beyond the room is not: the
    answer then ends with ``finish_reason`` "length".
    """
    if prompt_tokens == 0:
        raise InvalidRequest("the prompt is empty: it has no tokens", code="empty_prompt", param=prompt_field(request))
    room = max_model_len - prompt_tokens
    if room < 1:
        text = (
            f"the prompt has {prompt_tokens} tokens and leaves no room for an answer: "
            f"the context holds {max_model_len} tokens"
        )
        raise InvalidRequest(text, code=CONTEXT_LENGTH, param=prompt_field(request))
    limit = min(request.max_tokens or default_max_tokens, room)
    if request.max_tokens is None:
        limit = min(max(limit, request.min_tokens), room)
    return limit, min(request.min_tokens, limit)


def prompt_field(request: Request) -> str:
    """The name of the field that carries the prompt."""
    for name in ("input", "messages", "prompt"):
        if getattr(request, name) is not None:
            return name
    return "prompt_token_ids"


def check_token_ids(ids: Sequence[int], vocabulary: int, param: str) -> None:
    """Each id is an integer, nothing like one, of the vocabulary. An id outside it would kill the engine."""
    if ids and (set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= vocabulary):
        wrong = next(one for one in ids if type(one) is not int or not 0 <= one < vocabulary)
        raise InvalidRequest(f"token ids must be integers from 0 to {vocabulary - 1}, got {wrong!r}", param=param)


def token_bias(request: Request, vocabulary: int) -> dict[int, float] | None:
    """``logit_bias`` with its keys, decimal strings in JSON, as token ids."""
    if not request.logit_bias:
        return None
    bias: dict[int, float] = {}
    for key, value in request.logit_bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 12 and int(key) < vocabulary) or not math.isfinite(
            value
        ):
            text = f"keys must be token ids from 0 to {vocabulary - 1} and values finite, got {key!r}: {value!r}"
            raise InvalidRequest(text, param="logit_bias")
        bias[int(key)] = float(value)
    return bias
