"""What comes out of vLLM as completions of ours. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from contract.errors import HeadraceError, InvalidRequest, TransientError
from contract.money import Usage
from gpu_workers.engine import Completion
from gpu_workers.engines import choices, rules
from gpu_workers.engines.vllm_params import Payload


def completion(job_id: int, payload: Payload, output: Any, *, cancelled: bool) -> Completion:
    """The completion for a final ``RequestOutput``. ``cancelled``: we asked for its end."""
    usage = Usage.counted(
        len(output.prompt_token_ids), output.num_cached_tokens, sum(len(one.token_ids) for one in output.outputs)
    )
    if any(one.finish_reason == "error" for one in output.outputs):
        return Completion(job_id, usage, error=_failed(payload))
    if payload.schema and any(_is_nothing(one) for one in output.outputs):
        return Completion(job_id, usage, error=rules.no_answer_follows())
    answers = [
        choices.choice(
            chat=payload.chat,
            index=one.index,
            text=one.text,
            finish_reason=one.finish_reason,
            logprobs=None if payload.logprobs is None else _logprobs(one, payload),
        )
        for one in output.outputs
    ]
    return Completion(job_id, usage, answers, cancelled=cancelled and aborted(output))


def aborted(output: Any) -> bool:
    """Whether a choice was cut off, by us or by a core that shuts down."""
    return any(one.finish_reason == "abort" for one in output.outputs)


def _is_nothing(one: Any) -> bool:
    """Whether a choice ended by itself before it began: its grammar allows no first token."""
    return one.finish_reason == "stop" and one.stop_reason is None and not one.text


def _failed(payload: Payload) -> HeadraceError:
    if payload.schema:
        # A schema passes every check in front and fails when the core compiles it, or when it grows too complex
        # on the way. Nothing else makes vLLM end a request so.
        text = "vLLM could not follow the JSON schema: it is too complex, or a pattern in it is wrong"
        return InvalidRequest(text, param="response_format")
    return TransientError("vLLM ended the request with an error of its own", code="engine_error")


def refusal(error: Exception) -> HeadraceError:
    """What an exception of ``AsyncLLM.generate`` (other than its death) means for the request."""
    from vllm.exceptions import VLLMClientError

    cause = error.__cause__ if type(error).__name__ == "EngineGenerateError" and error.__cause__ else error
    if isinstance(cause, VLLMClientError):
        message = str(cause.args[0]) if cause.args else str(cause)
        return InvalidRequest(f"vLLM refuses it: {message}", param=getattr(cause, "parameter", None))
    if isinstance(cause, (TypeError, OverflowError, UnicodeEncodeError)):
        # vLLM calls these its own errors, but the request is what cannot be encoded, now or ever.
        return InvalidRequest(f"vLLM cannot take it: {type(cause).__name__}: {cause}")
    return TransientError(f"vLLM failed: {type(cause).__name__}: {cause}", code="engine_error")


def _logprobs(one: Any, payload: Payload) -> dict[str, Any]:
    return choices.logprobs(_entries(one, payload.logprobs or 0), chat=payload.chat)


def _entries(one: Any, count: int) -> Iterator[choices.TokenLogprob]:
    for token_id, place in zip(one.token_ids, one.logprobs or (), strict=False):
        chosen = place.get(token_id)
        ranked = sorted((entry.rank or 0, entry.decoded_token or "", entry.logprob) for entry in place.values())
        top = [(token, logprob) for rank, token, logprob in ranked if rank <= count]
        if chosen is None:
            yield choices.TokenLogprob("", None, top)
        else:
            yield choices.TokenLogprob(chosen.decoded_token or "", chosen.logprob, top)
