"""Real vLLM through headrace, against three other ways to get the same answers from the same engine arguments.

Never two engines at once: contenders go one after the other, and who is first changes from run to run.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import psycopg

from benchmarks import asks, chart, real
from benchmarks.asks import Ask
from benchmarks.figure import Goal
from benchmarks.real import Pace
from benchmarks.site import Site, peers_python
from contract import settings as contract_settings
from contract.settings import Engine
from gpu_workers.engines import http_server, vllm_profile
from headrace.stack.processes import Child
from tests.acceptance.harness import free_port

REQUESTS = 2_048
SERVICE_REQUESTS = 768
PICTURE = Path(__file__).with_name("concurrency.svg")
_MODEL = "tiny-llama"
_SERVER_S = 240.0

VS_GENERATE = (
    Goal("engine.vs_generate", "output tokens a second: headrace ÷ one `LLM.generate` call", "×", "≥ 0.85"),
    Goal("engine.headrace_tokens_per_s", "output tokens a second through headrace", "/s"),
    Goal("engine.generate_tokens_per_s", "output tokens a second of `LLM.generate`", "/s"),
    Goal("engine.headrace_running", "mean requests in the engine through headrace, of 64", ""),
    Goal("engine.generate_running", "mean requests in the engine under `LLM.generate`, of 64", ""),
)
VS_RUN_BATCH = (
    Goal("engine.vs_run_batch", "output tokens a second: headrace ÷ `vllm run-batch` on the same chats", "×", "> 1.0"),
    Goal("engine.run_batch_tokens_per_s", "output tokens a second of `vllm run-batch`", "/s"),
)
VS_SERVICE = (
    Goal(
        "engine.vs_service",
        "answers a second: headrace ÷ a FastStream handler that calls `vllm serve` and inserts a row",
        "×",
        "> 1.0; aim 1.5",
    ),
    Goal("engine.service_per_s", "answers a second of that service", "/s"),
)


def vs_generate(site: Site) -> dict[str, float]:
    """2,048 offline requests of mixed lengths through headrace, and in one ``LLM.generate`` call."""
    given = asks.make(asks.OFFLINE, site.scaled(REQUESTS))
    ours, theirs = _in_turn(site, lambda: real.through_headrace(site, given), lambda: generate(site, given))
    if site.scale == 1:
        series = {"headrace": ours.running, "LLM.generate": theirs.running}
        title = f"Requests in the engine while {len(given):,} are answered"
        PICTURE.write_text(chart.lines(title, "seconds", series, top=64))
    return {
        "engine.vs_generate": ours.tokens_per_s / theirs.tokens_per_s,
        "engine.headrace_tokens_per_s": ours.tokens_per_s,
        "engine.generate_tokens_per_s": theirs.tokens_per_s,
        "engine.headrace_running": _mean(ours),
        "engine.generate_running": _mean(theirs),
    }


def vs_run_batch(site: Site) -> dict[str, float]:
    """The same as chats: through headrace, and from a file by ``vllm run-batch``."""
    given = asks.make(asks.OFFLINE, site.scaled(REQUESTS))
    ours, theirs = _in_turn(site, lambda: real.through_headrace(site, given, Ask.chat), lambda: run_batch(site, given))
    return {
        "engine.vs_run_batch": ours.tokens_per_s / theirs.tokens_per_s,
        "engine.run_batch_tokens_per_s": theirs.tokens_per_s,
    }


def vs_service(site: Site) -> dict[str, float]:
    """768 chats through headrace, and through a handler that asks a model server and inserts a row."""
    given = asks.make(asks.OFFLINE, site.scaled(SERVICE_REQUESTS))
    ours, theirs = _in_turn(site, lambda: real.through_headrace(site, given, Ask.chat), lambda: service(site, given))
    return {"engine.vs_service": ours.per_s / theirs.per_s, "engine.service_per_s": theirs.per_s}


def _in_turn(site: Site, ours: Callable[[], Pace], theirs: Callable[[], Pace]) -> tuple[Pace, Pace]:
    if site.run % 2:
        other = theirs()
        return ours(), other
    return ours(), theirs()


def _mean(pace: Pace) -> float:
    return sum(held for _, held in pace.running) / max(1, len(pace.running))


# -- contenders -----------------------------------------------------------------------------------


def generate(site: Site, given: list[Ask]) -> Pace:
    """``peers/generate.py``: offline, all prompts in one list."""
    folder = _folder(site, "generate")
    found = real.outcome(
        "generate",
        folder,
        {
            "arguments": real.arguments(_engine()),
            "requests": str(asks.write(folder / "requests.jsonl", (one.prompt() for one in given))),
            "warm_up": str(asks.write(folder / "warm-up.jsonl", (one.prompt() for one in _warm_up()))),
        },
    )
    return _pace(given, found["output_tokens"], found["seconds"], found["running"])


def run_batch(site: Site, given: list[Ask]) -> Pace:
    """``peers/run_batch.py``: vLLM's own program for files."""
    folder = _folder(site, "run-batch")
    engine = real.arguments(_engine()) | {"served_model_name": _MODEL, "generation_config": "vllm"}
    found = real.outcome(
        "run_batch",
        folder,
        {
            "command_line": http_server.command_line(engine),
            "requests": str(asks.write(folder / "requests.jsonl", map(_batch_line, given))),
            "warm_up": str(asks.write(folder / "warm-up.jsonl", map(_batch_line, _warm_up()))),
        },
    )
    return _pace(given, found["output_tokens"], found["seconds"])


def service(site: Site, given: list[Ask]) -> Pace:
    """``peers/faststream_service.py`` beside ``vllm serve``: two processes, as headrace has."""
    python, port = peers_python(), free_port()
    folder = _folder(site, "service")
    url = f"http://127.0.0.1:{port}"
    engine = msgspec.structs.replace(_engine(), http_serve=True, http_url=f"{url}/v1", http_serve_folder=str(folder))
    words = http_server.Server(engine, _MODEL).arguments
    server = Child(
        "server",
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words],
        folder / "server.log",
        env=vllm_profile.environment(),
    )
    try:
        server.start()
        server.wait_until(lambda: _answers(f"{url}/health"), _SERVER_S, "it is up")
        for one in _warm_up()[:8]:
            _answers(f"{url}/v1/chat/completions", {"model": _MODEL, **one.chat()})
        with site.world(**real.sections()) as world:
            with psycopg.connect(world.settings.postgres.url) as connection:
                connection.execute(
                    "CREATE TABLE answers (id text, source text, business_line text, type text, status text,"
                    " prompt_tokens int, output_tokens int, output json, created_at timestamptz DEFAULT now())"
                )
            asks.publish(world, [one.chat() for one in given], "offline", bucket="short")
            site.calm()
            topic = world.topic("offline")
            handler = real.program(
                "faststream_service",
                folder,
                {
                    "bootstrap_servers": world.settings.kafka.bootstrap_servers,
                    "topic": topic,
                    "group": topic,
                    "postgres": world.settings.postgres.url,
                    "server": url,
                    "model": _MODEL,
                },
                python,
            )
            try:
                handler.start()
                count = "SELECT count(*) FROM answers WHERE status = 'ok'"
                handler.wait_until(lambda: world.value(count) >= len(given), real.DONE_S, f"{len(given)} rows")
                tokens = world.value("SELECT sum(output_tokens) FROM answers")
                (first_s, first_rows), *_, (last_s, _) = real.commits(world.settings.postgres.url, "answers")
            finally:
                handler.stop()
            # From its first row on, so that its start is not in it: a few short answers are its advantage.
            _pace(given, tokens, last_s - first_s)
            return Pace(len(given) - first_rows, tokens, last_s - first_s)
    finally:
        server.stop()


def _pace(given: list[Ask], tokens: int, seconds: float, running: Sequence[tuple[float, float]] = ()) -> Pace:
    wanted = sum(one.max_tokens for one in given)
    if tokens != wanted:
        raise RuntimeError(f"{tokens} tokens of answers, not {wanted}")
    return Pace(len(given), tokens, seconds, running)


def _engine() -> Engine:
    return contract_settings.build(real.sections()).engine


def _warm_up() -> list[Ask]:
    return asks.make(asks.OFFLINE, real.WARM_UP, "warm-up")


def _folder(site: Site, name: str) -> Path:
    folder = site.folder / f"{name}-{site.run}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _batch_line(one: Ask) -> dict[str, object]:
    fields = ("messages", "max_tokens", "temperature", "ignore_eos")
    chat = one.chat()
    body = {"model": _MODEL, **{name: chat[name] for name in fields}}
    return {"custom_id": one.id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def _answers(url: str, body: dict[str, object] | None = None) -> bool:
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
