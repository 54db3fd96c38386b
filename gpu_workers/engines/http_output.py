"""What comes back from an endpoint as completions of ours. Pure."""

from __future__ import annotations

import email.utils
import math
from typing import Any

import orjson

from contract.errors import HeadraceError, InvalidRequest, TransientError
from contract.money import Usage
from gpu_workers.engine import Completion, Prepared
from gpu_workers.engines import choices, rules
from gpu_workers.engines.http_params import Payload

_CUT_OFF = ("abort", "error")
"""vLLM's words for a choice that its own trouble ended."""
_MESSAGE_CHARACTERS = 500
_GRAMMAR_WORDS = ("grammar", "schema", "regex")
_VLLM_FAILED = ("Internal server error", "InternalServerError")
"""Message and type of vLLM's 500 for an answer that its core ended with "error", and for nothing else."""


def completion(job_id: int, prepared: Prepared, data: bytes) -> Completion:
    """The completion for the body of a 200. Raises ``ValueError`` when it is no whole answer."""
    answer = orjson.loads(data)
    given = answer.get("choices") if isinstance(answer, dict) else None
    count = prepared.request.n
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise ValueError("the answer has no list of choices")
    given = sorted(given, key=lambda one: str(one.get("index")).zfill(4))
    if [one.get("index") for one in given] != list(range(count)):
        raise ValueError(f"the answer has not the {count} choices that were asked for")
    answers = [_choice(one, prepared.payload) for one in given]
    usage = _usage(answer.get("usage"), prepared, answers)
    if prepared.payload.schema and any(map(_is_nothing, given, answers)):
        return Completion(job_id, usage, error=rules.no_answer_follows())
    return Completion(job_id, usage, answers)


def _is_nothing(given: dict[str, Any], made: dict[str, Any]) -> bool:
    """Whether a choice of vLLM's (who else tells a ``stop_reason``) ended by itself before it began."""
    text = made["text"] if "text" in made else made["message"]["content"]
    return given["finish_reason"] == "stop" and given.get("stop_reason", "") is None and not text


def _choice(given: dict[str, Any], payload: Payload) -> dict[str, Any]:
    reason = given.get("finish_reason")
    if not isinstance(reason, str) or reason in _CUT_OFF:
        raise ValueError(f"a choice ended with {reason!r}: it is not whole")
    message: dict[str, Any] = {}
    if payload.chat:
        found = given.get("message")
        if not isinstance(found, dict):
            raise ValueError("a choice has no message")
        message = {name: value for name, value in found.items() if value not in (None, [])}
    text = message.get("content", "") if payload.chat else given.get("text")
    if not isinstance(text, str):
        raise ValueError("a choice has no text")
    made = choices.choice(
        chat=payload.chat, index=given["index"], text=text, finish_reason=reason, logprobs=given.get("logprobs")
    )
    if payload.chat:
        made["message"] = message | made["message"]  # a refusal, a reasoning: what else the endpoint says stays
    return made


def _usage(given: Any, prepared: Prepared, answers: list[dict[str, Any]]) -> Usage:
    """As the endpoint counted. Without usable counts: estimated, and marked as such."""
    if isinstance(given, dict):
        details = given.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        counts = (given.get("prompt_tokens"), cached or 0, given.get("completion_tokens"))
        if all(type(count) is int for count in counts):
            return Usage.counted(*counts)
    size = sum(len(one["text"] if "text" in one else one["message"]["content"]) for one in answers)
    most = prepared.max_output_tokens * prepared.request.n
    return Usage(prepared.prompt_tokens, 0, max(1, min(most, math.ceil(size / 4))), contradictory=True)


def refusal(status: int, data: bytes, payload: Payload) -> InvalidRequest:
    """What a 4xx means for its sender, with the endpoint's own message and parameter."""
    message, code, param = _error(data)
    if code == rules.CONTEXT_LENGTH or param in ("input_tokens", "input_text"):  # OpenAI's word, vLLM's words
        code, param = rules.CONTEXT_LENGTH, payload.field
    if param is None and payload.schema and any(word in message.lower() for word in _GRAMMAR_WORDS):
        param = "response_format"  # vLLM names no parameter for what is wrong with a schema
    text = f"the endpoint refuses it ({status}): {message}"
    return InvalidRequest(text, code=code or "invalid_request", param=param)


def failure(status: int, data: bytes, payload: Payload) -> HeadraceError:
    """What a 5xx of an endpoint that lives means for the request."""
    if status == 500 and payload.schema and _is_vllms(data):
        text = (
            "the endpoint could not follow the JSON schema (500): it passed the check in front and failed in the core"
        )
        return InvalidRequest(text, param="response_format")
    return TransientError(f"the endpoint failed: {explain(status, data)}", code="engine_error")


def _is_vllms(data: bytes) -> bool:
    try:
        error = orjson.loads(data)["error"]
        return (error["message"], error["type"]) == _VLLM_FAILED
    except (ValueError, KeyError, TypeError):
        return False


def explain(status: int, data: bytes) -> str:
    """A line for people about an answer that is none."""
    return f"{status}: {_error(data)[0]}"


def _error(data: bytes) -> tuple[str, str | None, str | None]:
    """Message, code and param of an error's body: OpenAI's shape, FastAPI's, or any text."""
    try:
        body = orjson.loads(data)
    except ValueError:
        return data[:_MESSAGE_CHARACTERS].decode("utf-8", "replace").strip() or "no reason given", None, None
    error = body.get("error", body) if isinstance(body, dict) else body
    if not isinstance(error, dict):
        return str(error)[:_MESSAGE_CHARACTERS], None, None
    message = error.get("message") or error.get("detail") or error
    code, param = error.get("code"), error.get("param")
    return (
        str(message)[:_MESSAGE_CHARACTERS],
        code if isinstance(code, str) and code else None,
        (param.removeprefix("body.") or None) if isinstance(param, str) else None,
    )


def retry_after_s(header: str | None, now_s: float) -> float | None:
    """Seconds that a ``Retry-After`` header asks for: a number, or a date (``now_s``: wall clock). None: none."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(header).timestamp() - now_s
        except (ValueError, TypeError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
