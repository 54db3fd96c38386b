"""All settings: field, default, bound and meaning stand together. Frozen after load.

One file, ``headrace.toml``, plus the environment: ``HEADRACE_<SECTION>__<FIELD>``, deeper tables by
further ``__`` (``HEADRACE_CLASSES__ONLINE__WINDOW__MAX_WAIT_MS=20``). Units stand in the names. The
environment is read here and nowhere else. ``headrace config show`` prints every field with its
value, where that came from, its bound and its meaning.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from contract import routing
from contract.errors import SettingsError

ENV_PREFIX = "HEADRACE_"
DEFAULT_FILE = "headrace.toml"


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
    reserved_slots: Annotated[int, _doc("Engine slots never lent to lower classes.", ge=0, le=65_536)] = 0
    floor_slots: Annotated[int, _doc("Slots it may always use, however busy higher classes are.", ge=0, le=65_536)] = 0
    max_in_flight_requests: Annotated[
        int, _doc("Taken from Kafka and not settled, per length bucket: high mark.", ge=1, le=10_000_000)
    ] = 2_000
    max_in_flight_bytes: Annotated[int, _doc("The same in bytes of records.", ge=65_536, le=2**40)] = 67_108_864


def _classes() -> dict[str, PriorityClass]:
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
    classes: dict[str, PriorityClass] = msgspec.field(default_factory=_classes)
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


def load(file: str | os.PathLike[str] | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from ``file`` (default: ``$HEADRACE_CONFIG``, else ``headrace.toml`` if there) and environment.

    Raises ``SettingsError`` that names the field, the value and the fix.
    """
    env = os.environ if environ is None else environ
    return build(read(file, env)[0])


def read(file: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The raw tree of settings given, and for each dotted field where it came from."""
    named = file or environ.get(f"{ENV_PREFIX}CONFIG")
    path = Path(named or DEFAULT_FILE)
    tree: dict[str, Any] = {}
    if named or path.exists():
        try:
            tree = tomllib.loads(path.read_text("utf-8-sig"))
        except OSError as error:
            raise SettingsError("config file", str(path), f"cannot be read: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SettingsError("config file", str(path), f"is not TOML: {error}") from error
    origins = {field: str(path) for field, _ in _leaves(tree)}
    for name, value in environ.items():
        if not name.startswith(ENV_PREFIX) or "__" not in name:
            continue
        *tables, leaf = name[len(ENV_PREFIX) :].lower().split("__")
        node = tree
        for table in tables:
            node = node.setdefault(table, {})
            if not isinstance(node, dict):
                raise SettingsError(name, value, f"{table} is not a table")
        node[leaf] = _from_env(value)
        origins[".".join([*tables, leaf])] = f"${name}"
    return tree, origins


def build(tree: Mapping[str, Any]) -> Settings:
    """Settings from a raw tree. Named entries of ``classes`` and ``pools`` overlay the defaults."""
    try:
        tree = _with_default_classes(tree)
        settings = msgspec.convert(tree, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise _explain(error, tree) from None
    _cross_check(settings)
    return settings


def _with_default_classes(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A file that sets one field of class ``online`` keeps the other defaults of that class."""
    merged = dict(tree)
    classes = merged.get("classes")
    if isinstance(classes, dict):
        defaults = msgspec.to_builtins(_classes())
        merged["classes"] = {
            name: _overlay(defaults[name], given) if name in defaults and isinstance(given, dict) else given
            for name, given in classes.items()
        }
        if not any(isinstance(given, dict) and "rank" in given for given in classes.values()):
            merged["classes"] = defaults | merged["classes"]
    return merged


def _overlay(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in over.items():
        old = merged.get(name)
        merged[name] = _overlay(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _cross_check(settings: Settings) -> None:
    _check_endpoint(settings.engine)
    slots = settings.engine.slots
    reserved = sum(cls.reserved_slots for cls in settings.worker_classes.values()) if _classes_known(settings) else 0
    if reserved >= slots:
        field = "engine.max_requests" if slots == settings.engine.max_requests else "engine.http_connections"
        raise SettingsError(field, slots, f"must exceed the classes' reserved_slots, {reserved} in all")
    if settings.topics.min_insync_replicas > settings.topics.replication:
        raise SettingsError(
            "topics.min_insync_replicas",
            settings.topics.min_insync_replicas,
            f"must be at most topics.replication = {settings.topics.replication}",
        )
    for kind, names in (("class", settings.classes), ("bucket", settings.buckets.edges), ("pool", settings.pools)):
        if not names:
            raise SettingsError(kind, {}, "at least one is needed")
        for name in names:
            if not routing.is_word(name):
                raise SettingsError(f"name of a {kind}", name, "use a-z, 0-9, - and _, up to 63 characters")
    edges = list(settings.buckets.edges.values())
    if edges != sorted(set(edges)):
        raise SettingsError("buckets.edges", settings.buckets.edges, "edges must rise from short to long")
    for field, name in (("worker.pool", settings.worker.pool), ("client.pool", settings.client.pool)):
        if name not in settings.pools:
            raise SettingsError(field, name, f"is not one of [pools]: {', '.join(settings.pools)}")
    if settings.client.class_name not in settings.classes:
        raise SettingsError(
            "client.class_name", settings.client.class_name, f"is not one of [classes]: {', '.join(settings.classes)}"
        )
    if settings.worker.dead_after_s * 1000 <= settings.kafka.session_timeout_ms:
        raise SettingsError(
            "worker.dead_after_s",
            settings.worker.dead_after_s,
            f"must exceed kafka.session_timeout_ms = {settings.kafka.session_timeout_ms}",
        )
    if settings.postgres.results_days < settings.postgres.key_horizon_days:
        raise SettingsError(
            "postgres.results_days",
            settings.postgres.results_days,
            f"must be at least postgres.key_horizon_days = {settings.postgres.key_horizon_days}, "
            "else a duplicate could not be answered from the store",
        )
    if settings.postgres.key_horizon_days * 24 <= settings.topics.retention_hours:
        raise SettingsError(
            "postgres.key_horizon_days",
            settings.postgres.key_horizon_days,
            f"must be longer than topics.retention_hours = {settings.topics.retention_hours}, "
            "else a late duplicate would be computed again",
        )


def _check_endpoint(engine: Engine) -> None:
    if engine.kind != "http":
        return
    if not re.match(r"https?://[^/?#\s@]+(/[^?#\s]*)?$", engine.http_url):
        raise SettingsError(
            "engine.http_url",
            engine.http_url,
            'must be a URL such as "http://127.0.0.1:8000/v1" (engine.kind is "http")',
        )


def _classes_known(settings: Settings) -> bool:
    for name in settings.worker.classes:
        if name not in settings.classes:
            raise SettingsError("worker.classes", name, f"is not one of [classes]: {', '.join(settings.classes)}")
    return True


def _from_env(value: str) -> Any:
    """Tables and lists are given as TOML; everything else stays text and is converted by its field's type."""
    if value[:1] in ("{", "["):
        try:
            return tomllib.loads(f"v = {value}")["v"]
        except tomllib.TOMLDecodeError:
            return value
    return value


_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `(?P<name>[^`]*)`")


def _explain(error: msgspec.ValidationError, tree: Mapping[str, Any]) -> SettingsError:
    text = str(error)
    found = _PATH.search(text)
    path = _with_entry_names(found["path"], text, tree) if found else ""
    message = text[: found.start()] if found else text
    if unknown := _UNKNOWN.search(text):
        field = f"{path}.{unknown['name']}".lstrip(".")
        # Compared within its own table first: a class of the user's own has the fields of any class.
        known = {leaf.rpartition(".")[2]: leaf for leaf, _, _ in fields() if _same_table(leaf, path)}
        close = difflib.get_close_matches(unknown["name"], known, n=1)
        if close:
            fix = f"is not a setting; did you mean {path}.{close[0]}?"
        else:
            close = difflib.get_close_matches(
                field, [*Settings.__struct_fields__, *(leaf for leaf, _, _ in fields())], n=1
            )
            fix = (
                f"is not a setting; did you mean {close[0]}?" if close else "is not a setting; see headrace config show"
            )
        return SettingsError(field, _lookup(tree, field), fix)
    choices = next(((meta.extra or {}).get("choices") for leaf, _, meta in fields() if leaf == path), None)
    fix = f"must be one of {', '.join(choices)}" if choices else message.replace("`", "").replace("Expected", "must be")
    return SettingsError(path, _lookup(tree, path), fix)


def _with_entry_names(path: str, text: str, tree: Mapping[str, Any]) -> str:
    """``path`` with msgspec's ``[...]`` (some entry of a table of entries) replaced by the entry's name."""
    table, found, rest = path.partition("[...]")
    if not found:
        return path
    for name, entry in _lookup(tree, table).items():
        try:
            msgspec.convert(_replace(tree, table.split("."), {name: entry}), Settings, strict=False)
        except msgspec.ValidationError as error:
            if str(error) == text:
                return f"{table}.{name}{rest}"
    return path


def _replace(tree: Mapping[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    name, *rest = path
    return {**tree, name: _replace(tree[name], rest, value) if rest else value}


def _same_table(leaf: str, path: str) -> bool:
    table, _, _ = leaf.rpartition(".")
    if path.split(".")[0] in ("classes", "pools"):
        return table.split(".")[0::2] == path.split(".")[0::2] and table.count(".") == path.count(".")
    return table == path


def _lookup(tree: Any, path: str) -> Any:
    for part in path.replace("[", ".[").split("."):
        if isinstance(tree, list) and part.startswith("["):
            tree = tree[int(part.strip("[]"))]
        elif isinstance(tree, Mapping):
            tree = tree.get(part)
    return tree


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def environment(settings: Settings) -> dict[str, str]:
    """The environment that gives a child process these settings: ``load(None, environment(s)) == s``.

    Fields at their defaults are left out, unless they belong to a changed set of classes or pools.
    """
    default = Settings()
    defaults = {name: value for name, value, _ in fields(default)}
    changed = [table for table in ("classes", "pools") if getattr(settings, table) != getattr(default, table)]
    return {
        ENV_PREFIX + name.upper().replace(".", "__"): value if isinstance(value, str) else toml(value)
        for name, value, _ in fields(settings)
        if name.partition(".")[0] in changed or defaults.get(name, ...) != value
    }


def toml(value: Any) -> str:
    """A setting's value as TOML writes it, on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {toml(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(toml(item) for item in value) + "]"
    # Of text, numbers and truth, TOML's form is JSON's.
    return json.dumps(value, ensure_ascii=False)


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
