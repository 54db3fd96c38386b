"""Every field with its default, bound and meaning. Units stand in the names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from contract import routing


def _doc(text: str, **bounds: Any) -> msgspec.Meta:
    return msgspec.Meta(description=text, **bounds)


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Kafka(_Section, frozen=True):
    """The broker, and any client property passed through to it."""

    bootstrap_servers: Annotated[str, _doc("Broker addresses, host:port, by comma.", min_length=1)] = "127.0.0.1:9092"
    properties: Annotated[
        dict[str, Any], _doc("Properties of every client under librdkafka's names: SASL, TLS, anything.")
    ] = {}
    consumer: Annotated[dict[str, Any], _doc("Properties of consumers only.")] = {}
    producer: Annotated[dict[str, Any], _doc("Properties of producers only.")] = {}
    group_protocol: Annotated[
        Literal["classic", "consumer"], _doc("classic: cooperative-sticky; consumer: the newer protocol (KIP-848).")
    ] = "classic"
    session_timeout_ms: Annotated[int, _doc("A killed worker's partitions move after this.", ge=1_000, le=300_000)] = (
        8_000
    )
    request_timeout_s: Annotated[float, _doc("Deadline of one admin call or look-up.", gt=0, le=600)] = 15.0
    delivery_timeout_s: Annotated[float, _doc("A record not acknowledged by then has failed.", gt=0, le=3_600)] = 120.0


class Topics(_Section, frozen=True):
    """Names, partitions and limits of the topics that ``headrace topics create`` makes."""

    prefix: Annotated[str, _doc("First part of every topic name.", min_length=1, max_length=64)] = "headrace"
    partitions: Annotated[int, _doc("Per request topic; at least 4 × the workers you expect.", ge=1, le=10_000)] = 12
    reply_partitions: Annotated[int, _doc("Of the replies topic; one is used by each client.", ge=1, le=10_000)] = 16
    replication: Annotated[int, _doc("Copies of each partition.", ge=1, le=32)] = 1
    min_insync_replicas: Annotated[int, _doc("Copies that must acknowledge a write.", ge=1, le=32)] = 1
    retention_hours: Annotated[float, _doc("Of request topics.", gt=0, le=8_760)] = 72.0
    results_retention_hours: Annotated[float, _doc("Of results and replies.", gt=0, le=8_760)] = 72.0
    max_message_bytes: Annotated[int, _doc("Largest record of any topic.", ge=10_000, le=1_000_000_000)] = 1_048_576


class Window(_Section, frozen=True):
    """What closes a window: whichever bound is met first."""

    max_requests: Annotated[int, _doc("Requests.", ge=1, le=100_000)] = 256
    max_tokens: Annotated[int, _doc("Estimated total tokens.", ge=1, le=1_000_000_000)] = 262_144
    max_wait_ms: Annotated[
        int, _doc("From its first record; also closed early when the engine would idle.", ge=0, le=60_000)
    ] = 20


class PriorityClass(_Section, frozen=True):
    """One priority class. Rank 0 is served first."""

    rank: Annotated[int, _doc("Lower is served first; also vLLM's priority.", ge=0, le=100)] = 0
    window: Annotated[Window, _doc("How requests are pulled.")] = Window()
    default_deadline_ms: Annotated[
        int, _doc("For requests without one, from append time; 0 = none.", ge=0, le=2_592_000_000)
    ] = 0
    reserved_slots: Annotated[int, _doc("Engine slots kept free for it beside those it holds.", ge=0, le=65_536)] = 0
    floor_slots: Annotated[int, _doc("Slots it may always use, however busy higher classes are.", ge=0, le=65_536)] = 0
    max_in_flight_requests: Annotated[
        int, _doc("Taken from Kafka and not settled, per length bucket: high mark.", ge=1, le=10_000_000)
    ] = 2_000
    max_in_flight_bytes: Annotated[int, _doc("The same in bytes of records.", ge=65_536, le=2**40)] = 67_108_864


def default_classes() -> dict[str, PriorityClass]:
    return {
        "online": PriorityClass(rank=0, reserved_slots=8, default_deadline_ms=30_000),
        "offline": PriorityClass(
            rank=1, window=Window(max_requests=512, max_wait_ms=300), floor_slots=2, max_in_flight_requests=4_000
        ),
    }


class Buckets(_Section, frozen=True):
    """Length buckets by estimated total tokens. Raise ``version`` when you move an edge."""

    version: Annotated[int, _doc("Version of the edges.", ge=1)] = 1
    edges: Annotated[
        dict[str, Annotated[int, msgspec.Meta(ge=1)]],
        _doc("Name → upper edge in tokens, short to long; the last holds the rest."),
    ] = msgspec.field(default_factory=lambda: {"short": 256, "medium": 1_024, "long": 1_000_000_000})
    long_share: Annotated[
        float, _doc("Share of a worker's slots that the last bucket may hold while shorter ones wait.", gt=0, le=1)
    ] = 0.5
    long_share_alone: Annotated[
        float, _doc("The same while none waits; the rest stays free for the next. At least long_share.", gt=0, le=1)
    ] = 0.875


class Pool(_Section, frozen=True):
    """Workers that serve the same model."""

    model: Annotated[str, _doc("Name requests use for it and results carry.", min_length=1)] = "tiny-llama"
    tokenizer: Annotated[str, _doc("Path of a tokenizer for exact counts at publish; empty: estimate from bytes.")] = ""
    bytes_per_token: Annotated[
        float, _doc("Start value of the publishers' estimate; calibrated from results.", gt=0, le=64)
    ] = 4.0
    default_max_tokens: Annotated[int, _doc("For requests without max_tokens.", ge=1, le=1_000_000)] = 256


class Postgres(_Section, frozen=True):
    """The database."""

    url: Annotated[str, _doc("SQLAlchemy or libpq URL.", min_length=1)] = "postgresql://localhost/headrace"
    pool_size: Annotated[int, _doc("Connections of one process.", ge=2, le=1_000)] = 6
    connect_timeout_s: Annotated[float, _doc("Deadline of one connect.", gt=0, le=600)] = 5.0
    statement_timeout_s: Annotated[float, _doc("Client-side deadline of one transaction.", gt=0, le=3_600)] = 15.0
    key_horizon_days: Annotated[
        int, _doc("How long keys are remembered; longer than topic retention.", ge=1, le=3_650)
    ] = 7
    results_days: Annotated[int, _doc("Days of results kept.", ge=1, le=36_500)] = 90
    partitions_ahead_days: Annotated[int, _doc("Day partitions made ahead.", ge=1, le=366)] = 3


class Client(_Section, frozen=True):
    """The publishing library."""

    backend: Annotated[Literal["confluent", "kafka-python"], _doc("Which Kafka client library.")] = "confluent"
    source: Annotated[str, _doc("Source of requests that name none.", min_length=1, max_length=256)] = "default"
    pool: Annotated[str, _doc("Pool of requests that name none.")] = "default"
    class_name: Annotated[str, _doc("Class of requests that name none.")] = "online"
    max_unacknowledged: Annotated[int, _doc("submit_many waits above this.", ge=1, le=10_000_000)] = 10_000
    linger_ms: Annotated[int, _doc("How long the client library gathers records.", ge=0, le=10_000)] = 5
    affinity_spread: Annotated[int, _doc("Partitions over which one affinity value is spread.", ge=1, le=1_000)] = 2


class Worker(_Section, frozen=True):
    """A worker process."""

    pool: Annotated[str, _doc("The pool it serves.")] = "default"
    name: Annotated[str, _doc("Stable name; empty: host name and process id.", max_length=128)] = ""
    classes: Annotated[list[str], _doc("Classes it takes; empty: all.")] = []
    max_attempts: Annotated[int, _doc("Attempts per delivery: 2 is one retry.", ge=1, le=10)] = 2
    max_engine_deaths: Annotated[
        int, _doc("Deaths a request may be part of before it is dead-lettered.", ge=1, le=10)
    ] = 3
    drain_timeout_s: Annotated[float, _doc("One deadline for the whole of a shutdown.", gt=0, le=3_600)] = 30.0
    revoke_timeout_s: Annotated[float, _doc("One deadline for settling revoked partitions.", gt=0, le=300)] = 4.0
    settlers: Annotated[int, _doc("Settlements under way at a time, each with a connection.", ge=1, le=16)] = 2
    settle_max_requests: Annotated[int, _doc("Largest settlement.", ge=1, le=100_000)] = 2_000
    settle_max_wait_ms: Annotated[int, _doc("An outcome waits at most this for company.", ge=0, le=10_000)] = 5
    offset_distance: Annotated[
        int, _doc("Furthest a partition runs ahead of its lowest unfinished offset.", ge=1, le=10_000_000)
    ] = 20_000
    commit_interval_ms: Annotated[int, _doc("Between offset commits.", ge=10, le=60_000)] = 500
    heartbeat_s: Annotated[float, _doc("Between heartbeats and ledger rows.", gt=0, le=60)] = 1.0
    dead_after_s: Annotated[
        float, _doc("A worker without a heartbeat for this is dead; > session timeout.", gt=0, le=3_600)
    ] = 15.0
    crash_at: Annotated[
        str, _doc("For tests: kill -9 itself at this point of a request's life; see consumers/crash.py.")
    ] = ""
    http_port: Annotated[int, _doc("Port of /livez, /readyz, /metrics; 0: any free port, logged.", ge=0, le=65_535)] = 0


class Engine(_Section, frozen=True):
    """The engine of a worker."""

    kind: Annotated[Literal["vllm", "http", "simulated"], _doc("Which engine.")] = "vllm"
    model_path: Annotated[str, _doc("Model folder or name for vLLM.")] = ""
    max_requests: Annotated[
        int, _doc("Requests in the engine at once: credits and vLLM's max_num_seqs.", ge=1, le=65_536)
    ] = 64
    closed_batches: Annotated[
        bool,
        _doc("Fill the engine only when it is empty, with what a window brought: for engines that want whole batches."),
    ] = False
    max_model_len: Annotated[int, _doc("Context length, tokens.", ge=16, le=100_000_000)] = 1_024
    kv_tokens: Annotated[int, _doc("KV cache room in tokens; 0: as the engine reports.", ge=0, le=10**12)] = 0
    probe_interval_s: Annotated[float, _doc("Between round trips to the engine core.", gt=0, le=600)] = 2.0
    probe_timeout_s: Annotated[
        float, _doc("A core silent this long is dead; the first logprobs request stops it 10 s.", gt=0, le=600)
    ] = 30.0
    inference_factor: Annotated[
        float, _doc("Inference timeout = factor × (prefill + tokens × P99 per token).", ge=1, le=100)
    ] = 1.5
    inference_min_s: Annotated[float, _doc("Shortest inference timeout.", gt=0, le=3_600)] = 30.0
    vllm: Annotated[dict[str, Any], _doc("Further arguments of vLLM's AsyncEngineArgs, under their names.")] = {}
    http_url: Annotated[
        str, _doc("Base URL of an OpenAI-compatible endpoint, as its clients take it: http://127.0.0.1:8000/v1.")
    ] = ""
    http_api_key: Annotated[str, _doc("Sent as a bearer token; empty: none.")] = ""
    http_model: Annotated[str, _doc("The model's name at the endpoint; empty: the pool's.")] = ""
    http_connections: Annotated[
        int, _doc("Most connections for requests, and so requests at once; 0: max_requests.", ge=0, le=65_536)
    ] = 0
    http_connect_timeout_s: Annotated[float, _doc("Deadline of one connect.", gt=0, le=600)] = 5.0
    http_start_timeout_s: Annotated[
        float, _doc("How long a server of ours may load, or an endpoint that was up stay away.", gt=0, le=86_400)
    ] = 900.0
    http_serve: Annotated[
        bool, _doc("Start vLLM's server for http_url from model_path and [engine.vllm]; it outlives the worker.")
    ] = False
    http_serve_folder: Annotated[str, _doc("Where such servers' logs and process ids are kept.", min_length=1)] = (
        ".headrace/serve"
    )
    simulated_prefill_tokens_per_s: Annotated[float, _doc("0 = at once.", ge=0)] = 200_000.0
    simulated_step_ms: Annotated[float, _doc("One decode step of an empty batch; 0 = at once.", ge=0, le=60_000)] = 8.0
    simulated_step_ms_per_request: Annotated[float, _doc("Added per running request.", ge=0, le=60_000)] = 0.05
    simulated_faults: Annotated[bool, _doc("Obey fault words in prompts. For tests.")] = False

    @property
    def slots(self) -> int:
        """Requests in the engine at once."""
        limit = self.http_connections if self.kind == "http" else 0
        return min(self.max_requests, limit or self.max_requests)


class Cost(_Section, frozen=True):
    """First price and tariff of a new database. Later ones are rows (``headrace cost --help``)."""

    gpu_kind: Annotated[str, _doc("What this worker's hour is priced as.", min_length=1)] = "cpu"
    gpu_usd_per_hour: Annotated[str, _doc("Decimal US dollars.", pattern=r"^\d+(\.\d+)?$")] = "2.00"
    input_usd_per_million: Annotated[str, _doc("Decimal US dollars.", pattern=r"^\d+(\.\d+)?$")] = "0.15"
    cached_input_usd_per_million: Annotated[str, _doc("Decimal US dollars.", pattern=r"^\d+(\.\d+)?$")] = "0.015"
    output_usd_per_million: Annotated[str, _doc("Decimal US dollars.", pattern=r"^\d+(\.\d+)?$")] = "0.60"


class Log(_Section, frozen=True):
    """Structured logs on stderr."""

    level: Annotated[Literal["debug", "info", "warning", "error"], _doc("Least level written.")] = "info"
    format: Annotated[Literal["json", "console"], _doc("One JSON object a line, or coloured text.")] = "json"


class Settings(_Section, frozen=True):
    """Everything. One table per section."""

    kafka: Kafka = Kafka()
    topics: Topics = Topics()
    classes: dict[str, PriorityClass] = msgspec.field(default_factory=default_classes)
    buckets: Buckets = Buckets()
    pools: dict[str, Pool] = msgspec.field(default_factory=lambda: {"default": Pool()})
    postgres: Postgres = Postgres()
    client: Client = Client()
    worker: Worker = Worker()
    engine: Engine = Engine()
    cost: Cost = Cost()
    log: Log = Log()

    @property
    def names(self) -> routing.TopicNames:
        return routing.TopicNames(self.topics.prefix)

    @property
    def worker_classes(self) -> dict[str, PriorityClass]:
        """The classes this worker takes, highest rank first."""
        chosen = self.worker.classes or list(self.classes)
        return {name: self.classes[name] for name in sorted(chosen, key=lambda name: self.classes[name].rank)}


def fields(settings: Settings | None = None) -> Iterator[tuple[str, Any, msgspec.Meta]]:
    """Every field as (dotted name, value, meta with description and bounds), in the order of the file.

    The choices of a field that takes one of a few words stand in ``meta.extra["choices"]``.
    """
    yield from _fields(settings or Settings(), "")


def _fields(section: msgspec.Struct, prefix: str) -> Iterator[tuple[str, Any, msgspec.Meta]]:
    hints = get_type_hints(type(section), include_extras=True)
    for name in section.__struct_fields__:
        value = getattr(section, name)
        if isinstance(value, msgspec.Struct):
            yield from _fields(value, f"{prefix}{name}.")
        elif isinstance(value, dict) and value and all(isinstance(item, msgspec.Struct) for item in value.values()):
            for key, item in value.items():
                yield from _fields(item, f"{prefix}{name}.{key}.")
        else:
            plain, *metas = get_args(hints[name])
            meta = metas[0]
            if get_origin(plain) is Literal:
                meta = msgspec.Meta(description=meta.description, extra={"choices": get_args(plain)})
            yield f"{prefix}{name}", value, meta
