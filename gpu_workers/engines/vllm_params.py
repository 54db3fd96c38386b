"""Makes requests ready for vLLM: prompt text, tokens, and sampling parameters that its core can decode.

vLLM's core decodes what it is sent strictly and goes deaf for ever at the first wrong type, so the
parameters go through vLLM's own codec here first. Works without the engine, on any thread.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import msgspec

from contract.errors import InvalidRequest
from contract.messages import Request
from gpu_workers.engine import Prepared
from gpu_workers.engines import rules

_MESSAGE_CHARACTERS = 500
"""vLLM repeats the whole of a schema or pattern."""


@dataclasses.dataclass(slots=True)
class Payload:
    """What ``submit`` hands to vLLM, and what the answer's shape depends on."""

    token_ids: list[int]
    params: Any
    """``vllm.SamplingParams``."""
    chat: bool
    logprobs: int | None
    schema: bool


@dataclasses.dataclass(slots=True)
class _Draft:
    """A request on its way: the checked part before its prompt is tokenised."""

    request: Request
    logprobs: int | None
    schema: dict[str, Any] | str | None
    text: str | None
    add_special_tokens: bool = False
    token_ids: list[int] = dataclasses.field(default_factory=list)


class Preparer:
    """Implements ``Engine.prepare`` for vLLM.

    Args:
        vllm_config: of a started engine.
        tokenizer: the engine's; a private copy of its fast core is used.
        model: the name that requests may use.
    """

    def __init__(self, vllm_config: Any, tokenizer: Any, *, model: str, default_max_tokens: int) -> None:
        self._config = vllm_config
        self._tokenizer = tokenizer
        self._model = model
        self._default_max_tokens = default_max_tokens
        self._max_model_len: int = vllm_config.model_config.max_model_len
        self._vocabulary: int = vllm_config.model_config.get_vocab_size()
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        self._fast = _fast_copy(tokenizer)
        self._slow_lock = threading.Lock()

    def prepare(self, requests: Sequence[Request]) -> list[Prepared | InvalidRequest]:
        """One entry per request, in order."""
        drafts = [self._guarded(self._draft, request) for request in requests]
        for special in (False, True):
            group = [
                index
                for index, draft in enumerate(drafts)
                if isinstance(draft, _Draft) and draft.text is not None and draft.add_special_tokens is special
            ]
            self._tokenise(drafts, group, special)
        return [draft if isinstance(draft, InvalidRequest) else self._guarded(self._finish, draft) for draft in drafts]

    @staticmethod
    def _guarded(step: Any, subject: Any) -> Any:
        """The step's result, or the refusal. One request's fault, of whatever kind, stays its own."""
        try:
            return step(subject)
        except InvalidRequest as error:
            return error
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - templates and vLLM's checks raise anything, Rust its panics
            text = f"the engine cannot take it: {type(error).__name__}: {str(error)[:_MESSAGE_CHARACTERS]}"
            return InvalidRequest(text)

    # -- prompt -----------------------------------------------------------------------------------

    def _draft(self, request: Request) -> _Draft:
        rules.check(request, self._model)
        logprobs, schema = rules.logprob_count(request), rules.response_schema(request)
        if request.prompt_token_ids is not None:
            return _Draft(request, logprobs, schema, None, token_ids=request.prompt_token_ids)
        if request.prompt is not None:
            return _Draft(request, logprobs, schema, request.prompt, add_special_tokens=True)
        if not self._has_template:
            if request.input is None:
                text = "this model has no chat template; send input or prompt instead"
                raise InvalidRequest(text, code=rules.UNSUPPORTED, param="messages")
            return _Draft(request, logprobs, schema, request.input, add_special_tokens=True)
        return _Draft(request, logprobs, schema, self._render(request))

    def _render(self, request: Request) -> str:
        messages = rules.chat_messages(request)
        try:
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template raises what it likes
            text = f"the model's chat template refuses the messages: {error}"
            raise InvalidRequest(text, param=rules.prompt_field(request)) from error
        return text

    def _tokenise(self, drafts: list[Any], group: list[int], special: bool) -> None:
        """Fills in the tokens of the drafts at ``group``; one that cannot be tokenised becomes its refusal."""
        if not group:
            return
        try:
            for index, ids in zip(group, self._encode([drafts[at].text for at in group], special), strict=True):
                drafts[index].token_ids = ids
        except (TypeError, ValueError):  # one text is not UTF-8; find it
            for index in group:
                draft = drafts[index]
                try:
                    (draft.token_ids,) = self._encode([draft.text], special)
                except (TypeError, ValueError) as error:
                    text = f"the prompt cannot be tokenised: {error}"
                    drafts[index] = InvalidRequest(text, param=rules.prompt_field(draft.request))

    def _encode(self, texts: list[str], special: bool) -> list[list[int]]:
        if self._fast is not None:
            return [one.ids for one in self._fast.encode_batch_fast(texts, add_special_tokens=special)]
        with self._slow_lock:
            return [list(self._tokenizer.encode(text, add_special_tokens=special)) for text in texts]

    # -- parameters -------------------------------------------------------------------------------

    def _finish(self, draft: _Draft) -> Prepared:
        request = draft.request
        rules.check_token_ids(draft.token_ids, self._vocabulary, rules.prompt_field(request))
        limit, least = rules.output_limits(request, len(draft.token_ids), self._max_model_len, self._default_max_tokens)
        params = self._sampling(draft, limit, least)
        payload = Payload(
            draft.token_ids, params, rules.is_chat(request), draft.logprobs, isinstance(draft.schema, dict)
        )
        return Prepared(request, len(draft.token_ids), limit, payload)

    def _sampling(self, draft: _Draft, limit: int, least: int) -> Any:
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

        request, structured = draft.request, None
        if draft.schema == "json_object":
            structured = StructuredOutputsParams(json_object=True)
        elif draft.schema is not None:
            structured = StructuredOutputsParams(json=draft.schema)
        try:
            params = SamplingParams(
                n=request.n,
                max_tokens=limit,
                min_tokens=least,
                temperature=request.temperature,
                top_p=request.top_p,
                top_k=request.top_k,
                min_p=request.min_p,
                seed=request.seed,
                stop=request.stops,
                presence_penalty=request.presence_penalty,
                frequency_penalty=request.frequency_penalty,
                repetition_penalty=request.repetition_penalty,
                logit_bias=rules.token_bias(request, self._vocabulary),
                logprobs=draft.logprobs,
                ignore_eos=request.ignore_eos,
                structured_outputs=structured,
                output_kind=RequestOutputKind.FINAL_ONLY,
                skip_clone=True,  # the parameters are this request's own
            )
            config = self._config
            params.verify(
                config.model_config, config.speculative_config, config.structured_outputs_config, self._tokenizer
            )
            # What its core cannot decode would make it deaf for everybody.
            msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
        except (VLLMClientError, msgspec.ValidationError, TypeError, ValueError, OverflowError) as error:
            param = getattr(error, "parameter", None) or ("response_format" if structured else None)
            message = str(error.args[0] if isinstance(error, VLLMClientError) and error.args else error)
            raise InvalidRequest(f"vLLM refuses it: {message[:_MESSAGE_CHARACTERS]}", param=param) from error
        return params


def _fast_copy(tokenizer: Any) -> Any:
    """A copy of a fast tokenizer's core that cuts and pads nothing and is safe on many threads; None: it is slow."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None or not hasattr(core, "encode_batch_fast"):
        return None
    copy = type(core).from_str(core.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy
