"""Request and result as they stand on the wire: JSON, UTF-8, one schema, versioned.

orjson parses and writes, msgspec checks types and bounds. Types are strict: ``"max_tokens": 4.0``
is refused here, because a float there makes vLLM's core deaf. Unknown fields are kept aside in
``extra``, so that a newer publisher works with an older worker.
"""

from __future__ import annotations

import datetime as dt
import json
import math
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import orjson

from contract.errors import InvalidRequest
from contract.statuses import Status

SCHEMA_VERSION = 1
LOGPROB_FLOOR = -9999.0
"""What -inf becomes (OpenAI's and vLLM's own convention); NaN, +inf and missing become null."""

REPLACEMENT = "\ufffd"

_Id = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
_Label = Annotated[str, msgspec.Meta(max_length=256)]
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]


class Request(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One inference request. Exactly one of input, messages, prompt and prompt_token_ids is given."""

    v: Annotated[int, msgspec.Meta(ge=1, description="Schema version of this message.")] = SCHEMA_VERSION
    id: Annotated[_Id | None, msgspec.Meta(description="The publisher's id, unique within its source.")] = None
    source: Annotated[_Label, msgspec.Meta(description="Who publishes; owns the ids.")] = ""
    model: Annotated[_Label | None, msgspec.Meta(description="Model to answer; None: the pool's own.")] = None

    input: Annotated[str | None, msgspec.Meta(description="One user message, through the chat template.")] = None
    messages: Annotated[list[dict[str, Any]] | None, msgspec.Meta(description="OpenAI chat messages.")] = None
    prompt: Annotated[str | None, msgspec.Meta(description="Raw text to complete, no template.")] = None
    prompt_token_ids: Annotated[list[int] | None, msgspec.Meta(description="The prompt, already tokens.")] = None

    max_tokens: Annotated[_Tokens | None, msgspec.Meta(description="Most tokens to generate per choice.")] = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0, le=10_000_000)] = 0
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0, le=1_000_000, description="0 = all.")] = 0
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    n: Annotated[int, msgspec.Meta(ge=1, le=128, description="Choices.")] = 1
    stop: Annotated[str | list[str] | None, msgspec.Meta(description="Up to 16 strings that end a choice.")] = None
    seed: _Int64 | None = None
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=10)] = 1.0
    logit_bias: dict[str, Annotated[float, msgspec.Meta(ge=-100, le=100)]] | None = None
    logprobs: Annotated[
        bool | Annotated[int, msgspec.Meta(ge=0, le=20)] | None,
        msgspec.Meta(description="true (chat) or a count (completions)."),
    ] = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    ignore_eos: bool = False
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None

    deadline: Annotated[
        Annotated[dt.datetime, msgspec.Meta(tz=True)] | None, msgspec.Meta(description="Absolute, RFC 3339.")
    ] = None
    deadline_ms: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=2_592_000_000)] | None,
        msgspec.Meta(description="Relative, milliseconds; from publish, else from the record's append time."),
    ] = None

    business_line: _Label = ""
    type: Annotated[_Label, msgspec.Meta(description="Kind of work, for cost reports.")] = ""
    tags: dict[str, str] | None = None
    cache: Annotated[bool, msgspec.Meta(description="false: do not answer from the result cache.")] = True
    affinity: Annotated[_Label | None, msgspec.Meta(description="Equal values meet in few workers.")] = None
    store: Annotated[bool, msgspec.Meta(description="false: keep no output in the database.")] = True
    on_failure: Annotated[
        Literal["degrade", "fail"], msgspec.Meta(description="Whether a lower rung of the ladder may answer.")
    ] = "degrade"
    batch_id: _Label | None = None
    custom_id: Annotated[_Label | None, msgspec.Meta(description="Only carried along.")] = None
    extra: Annotated[dict[str, Any] | None, msgspec.Meta(description="Fields this version does not know.")] = None

    @property
    def stops(self) -> list[str]:
        """``stop`` as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class ErrorBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Why there is no (full) answer."""

    code: str
    message: str
    param: str | None = None


class UsageBody(msgspec.Struct, kw_only=True):
    """Token counts; ``prompt_tokens`` includes ``cached_tokens``."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class Result(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What became of one request. ``output`` has OpenAI's shape: ``{"choices": [...]}``."""

    v: int = SCHEMA_VERSION
    key: str
    generation: int = 1
    id: str | None = None
    source: str = ""
    status: Status
    output: dict[str, Any] | None = None
    output_ref: Annotated[
        str | None, msgspec.Meta(description="Set when the output is too large for a record: read it in Postgres.")
    ] = None
    model: Annotated[str | None, msgspec.Meta(description="Which model really answered.")] = None
    usage: UsageBody = msgspec.field(default_factory=UsageBody)
    latency_ms: Annotated[float, msgspec.Meta(description="From append to the topic until settled.")] = 0.0
    queue_ms: float = 0.0
    inference_ms: float = 0.0
    cost_usd: Annotated[str, msgspec.Meta(description="Charge by tariff, a decimal string.")] = "0"
    degrade_level: int = 0
    error: ErrorBody | None = None
    attempt: Annotated[int, msgspec.Meta(description="Which try answered, from 1.")] = 1
    worker: str = ""
    altered: Annotated[
        bool, msgspec.Meta(description="Text that UTF-8 or Postgres cannot hold was replaced by U+FFFD.")
    ] = False
    business_line: str = ""
    type: str = ""
    tags: dict[str, str] | None = None
    batch_id: str | None = None
    custom_id: str | None = None


_WIRE_FIELDS = frozenset(Request.__struct_fields__) - {"extra"}
_PROMPTS = ("input", "messages", "prompt", "prompt_token_ids")
_ENVELOPE = ("id", "source", "model", "business_line", "type", "batch_id", "custom_id")


class Parsed(NamedTuple):
    """What could be read of a record's value."""

    request: Request
    error: InvalidRequest | None = None
    """What is wrong with it; None: nothing."""
    altered: bool = False
    """Half a surrogate pair in it was replaced by U+FFFD."""


def parse_request(value: bytes | None) -> Parsed:
    """The request in a record's value, and what is wrong with it.

    Never raises. A wrong request comes back as its readable envelope fields, so that its sender gets
    an outcome under the right id.
    """
    if value is None:
        return _unread("tombstone", "the record has no value (a tombstone)")
    if not value:
        return _unread("empty_value", "the record's value is empty")
    try:
        raw, altered = _loads(value)
    except ValueError as error:
        return _unread("invalid_json", f"the value is not JSON: {error}")
    except RecursionError:
        return _unread("invalid_json", "the value is JSON nested too deep")
    if not isinstance(raw, dict):
        return _unread("not_an_object", f"the value must be a JSON object, not {type(raw).__name__}")
    try:
        extra = None
        if not _WIRE_FIELDS.issuperset(raw):
            extra = {name: field for name, field in raw.items() if name not in _WIRE_FIELDS}
            raw = {name: field for name, field in raw.items() if name in _WIRE_FIELDS}
        request = msgspec.convert(raw, Request)
        request.extra = extra
        check_request(request)
    except msgspec.ValidationError as error:
        return Parsed(envelope(raw), invalid_from(error), altered)
    except InvalidRequest as error:
        return Parsed(envelope(raw), error, altered)
    return Parsed(request, None, altered)


def _unread(code: str, message: str) -> Parsed:
    return Parsed(Request(), InvalidRequest(message, code=code))


def check_request(request: Request) -> None:
    """What types and bounds cannot say. Raises ``InvalidRequest``."""
    if request.v > SCHEMA_VERSION:
        raise InvalidRequest(f"schema version {request.v} is newer than this worker's {SCHEMA_VERSION}", param="v")
    prompts = (request.input, request.messages, request.prompt, request.prompt_token_ids)
    if prompts.count(None) != 3:
        given = [name for name, value in zip(_PROMPTS, prompts, strict=True) if value is not None]
        found = "none of them" if not given else " and ".join(given)
        raise InvalidRequest(f"give exactly one of input, messages, prompt, prompt_token_ids; found {found}")
    if request.messages is not None:
        for index, message in enumerate(request.messages):
            if not isinstance(message.get("role"), str):
                param = f"messages[{index}].role"
                raise InvalidRequest(f"messages[{index}] needs a role that is a string", param=param)
        if not request.messages:
            raise InvalidRequest("messages must not be empty", param="messages")
    if request.stop is not None and (len(request.stops) > 16 or not all(request.stops)):
        raise InvalidRequest("stop takes up to 16 strings, none of them empty", param="stop")


def invalid_from(error: msgspec.ValidationError) -> InvalidRequest:
    """msgspec's ``Expected `int`, got `float` - at `$.max_tokens``` as our error, with the field named."""
    message, _, path = str(error).partition(" - at `$")
    param = path.rstrip("`").lstrip(".") or None
    return InvalidRequest(f"{param}: {message}" if param else message, param=param)


def envelope(raw: dict[str, Any]) -> Request:
    """The fields of a wrong request that can still be read as text."""
    fields = {name: raw[name] for name in _ENVELOPE if isinstance(raw.get(name), str) and 0 < len(raw[name]) <= 512}
    return Request(**fields)


def _loads(value: bytes) -> tuple[Any, bool]:
    """The JSON value, and whether half a surrogate pair had to be replaced."""
    try:
        return orjson.loads(value), False
    except orjson.JSONDecodeError as error:
        if b"\\u" not in value:
            raise ValueError(str(error)) from None
        # orjson refuses escaped lone surrogates. A publisher that cut an emoji in half still gets an
        # answer: the half becomes U+FFFD. Anything else that is wrong stays wrong here too.
        loaded = json.loads(value, parse_constant=_refuse_constant)
        mended = _mend(loaded)
        return mended, mended != loaded


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _mend(value: Any) -> Any:
    if isinstance(value, str):
        return clean_surrogates(value)
    if isinstance(value, list):
        return [_mend(item) for item in value]
    if isinstance(value, dict):
        return {clean_surrogates(name): _mend(item) for name, item in value.items()}
    return value


def clean_surrogates(text: str) -> str:
    """``text`` with each half of a surrogate pair replaced by U+FFFD; the rest unchanged."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return "".join(REPLACEMENT if "\ud800" <= char <= "\udfff" else char for char in text)
    return text


def clean_text(text: str) -> str:
    """``text`` as Postgres can hold it: no lone surrogates, no NUL."""
    cleaned = clean_surrogates(text)
    return cleaned.replace("\0", REPLACEMENT) if "\0" in cleaned else cleaned


def clean_json(value: Any) -> tuple[Any, bool]:
    """A JSON value as every strict parser and Postgres can hold it, and whether text had to be replaced.

    NUL and lone surrogates (also in object keys) become U+FFFD; NaN and infinities become null.
    """
    if isinstance(value, str):
        cleaned = clean_text(value)
        return cleaned, cleaned is not value and cleaned != value
    if isinstance(value, float):
        return (value if math.isfinite(value) else None), False
    if isinstance(value, (list, tuple)):
        pairs = [clean_json(item) for item in value]
        return [item for item, _ in pairs], any(changed for _, changed in pairs)
    if isinstance(value, dict):
        fields, changed = {}, False
        for name, item in value.items():
            clean_name, name_changed = clean_json(str(name))
            fields[clean_name], item_changed = clean_json(item)
            changed = changed or name_changed or item_changed
        return fields, changed
    return value, False


def dump_output(output: dict[str, Any]) -> tuple[bytes, bool]:
    """An answer as JSON bytes for topic and table, and whether text in it had to be replaced.

    The fast path is one orjson call; only an answer with NUL or a lone surrogate is walked.
    """
    try:
        data = orjson.dumps(output)
    except (TypeError, orjson.JSONEncodeError):
        cleaned, changed = clean_json(output)
        return orjson.dumps(cleaned), changed
    if b"\\u0000" in data:
        cleaned, changed = clean_json(output)
        return (orjson.dumps(cleaned), True) if changed else (data, False)
    return data, False


def json_logprob(logprob: float | None) -> float | None:
    """A log-probability as JSON can write it: -inf is ``LOGPROB_FLOOR``, NaN, +inf and None are null."""
    if logprob is None or math.isnan(logprob) or logprob == math.inf:
        return None
    return max(logprob, LOGPROB_FLOOR)


def encode(message: Request | Result, **raw_json: bytes) -> bytes:
    """A message as JSON bytes, defaults left out. ``raw_json`` fields are already JSON and go in as they are."""
    fields = msgspec.to_builtins(message, builtin_types=(dt.datetime,))
    for name, data in raw_json.items():
        fields[name] = orjson.Fragment(data)
    extra = fields.pop("extra", None)
    if extra:
        fields = extra | fields
    return orjson.dumps(fields)


def encode_result(result: Result, output: bytes | None) -> bytes:
    """A result as JSON bytes, in one pass. ``output`` is JSON already and goes in as it is; None: there is none."""
    if output is not None:
        result.output = msgspec.Raw(output)  # type: ignore[assignment] # the encoder copies it
    return _ENCODER.encode(result)


_ENCODER = msgspec.json.Encoder()


def parse_result(value: bytes) -> Result:
    """A result from its record's value. Raises ``msgspec.ValidationError`` or ``orjson.JSONDecodeError``."""
    return msgspec.convert(orjson.loads(value), Result)


def schemas() -> dict[str, Any]:
    """JSON Schema (2020-12) of request and result, for publishers in other languages."""
    (_, components) = msgspec.json.schema_components([Request, Result], ref_template="#/$defs/{name}")
    del components["Request"]["properties"]["extra"]  # where unknown fields are kept, not a field to send
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:headrace:messages:v{SCHEMA_VERSION}",
        "title": "headrace messages",
        "anyOf": [{"$ref": "#/$defs/Request"}, {"$ref": "#/$defs/Result"}],
        "$defs": components,
    }
