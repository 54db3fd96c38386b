"""vLLM's own server beside a worker: found again, never twice, ended whole. One real start, the others end at once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from contract import settings as contract_settings
from contract.errors import EngineDied, FatalError
from contract.messages import Request
from contract.settings import Settings
from gpu_workers import _guardian, guard
from gpu_workers.engine import Completion
from gpu_workers.engines import http_server
from gpu_workers.engines.http_server import Server
from headrace.cli import main
from headrace.stack.processes import wait_for
from tests.acceptance.harness import free_port
from tests.integration.engine_rig import Rig, alive, parse

_ROOT = Path(__file__).parents[2]


def _settings(folder: Path, model_path: Path, **engine: Any) -> Settings:
    section = {
        "kind": "http",
        "http_url": f"http://127.0.0.1:{free_port()}/v1",
        "http_serve": True,
        "http_serve_folder": str(folder),
        "http_start_timeout_s": 300,
        "model_path": str(model_path),
        "max_model_len": 256,
        "max_requests": 16,
    }
    return contract_settings.build({"engine": section | engine})


def _server(settings: Settings, model: str = "tiny-llama") -> Server:
    return Server(settings.engine, model)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "serve"
    for record in http_server.records(tmp_path / "serve"):
        record.end(0.0)


def test_server_is_started_once_by_many_at_once_found_by_its_marker_and_ended_whole(
    folder: Path, model_path: Path
) -> None:
    settings = _settings(folder, model_path)
    pids: list[int] = []
    threads = [threading.Thread(target=lambda: pids.append(_server(settings).ensure())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(pids) == 4
    assert len(set(pids)) == 1, "started twice"
    record = _server(settings).record
    wait_for(record.running_pid, 10, "the server's program runs")
    (carried,) = set(_guardian.carriers(record.marker).values())
    assert carried == record.marker
    assert pids[0] not in _guardian.carriers(f"{guard.MARKER}=".encode()), "a worker's guard would end it"
    assert record.end(0.0)
    assert _guardian.carriers(record.marker) == {}
    assert not record.end(0.0)


def test_server_with_other_arguments_is_not_taken_for_ours_and_a_suspect_is_replaced(
    folder: Path, model_path: Path
) -> None:
    settings = _settings(folder, model_path)
    server = _server(settings)
    pid = server.ensure()
    with pytest.raises(FatalError, match="headrace engine stop"):
        _server(settings, "another-model").ensure()
    assert server.ensure(suspect=pid + 1) == pid
    assert server.ensure(suspect=pid) != pid
    assert not alive(pid)


def test_process_that_merely_has_the_number_of_an_old_server_is_left_alone(folder: Path, model_path: Path) -> None:
    record = _server(_settings(folder, model_path)).record
    with record.alone():
        record.write(os.getpid(), [])
    assert record.running_pid() == 0
    assert not record.end(0.0)


def test_port_in_use_and_a_url_elsewhere_are_fatal_with_what_to_do(folder: Path, model_path: Path) -> None:
    settings = _settings(folder, model_path)
    server = _server(settings)
    with socket.socket() as other:
        other.bind(("127.0.0.1", server.record.port))
        other.listen()
        with pytest.raises(FatalError, match=r"in use.*engine\.http_url"):
            server.ensure()
    with pytest.raises(FatalError, match=r"engine\.http_serve.*on this machine"):
        _server(_settings(folder, model_path, http_url="https://api.example.com/v1"))


async def test_server_that_ends_while_it_starts_is_fatal_with_the_end_of_its_log(
    folder: Path, model_path: Path
) -> None:
    settings = _settings(folder, model_path)
    record = _server(settings).record
    rig = Rig(settings)
    starting = asyncio.create_task(rig.start())
    await rig.until(lambda: record.running_pid() != 0)
    record.log.write_text("out of memory, say")
    os.kill(record.running_pid(), signal.SIGKILL)
    with pytest.raises(FatalError, match=r"ended while it started.*\nout of memory, say"):
        await asyncio.wait_for(starting, 10)
    await rig.close()


def _loaded(record: http_server.Record) -> subprocess.Popen[bytes]:
    """Stands in for a vLLM that has loaded: the same marker, the same port."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.integration.http_endpoint", str(record.port)],
        env=os.environ | dict([record.marker.decode().split("=", 1)]),
        cwd=_ROOT,
    )


@pytest.mark.parametrize("recovers", [False, True])
async def test_server_that_fell_silent_is_replaced_by_the_next_start_unless_it_recovers(
    folder: Path, model_path: Path, recovers: bool
) -> None:
    settings = _settings(folder, model_path)
    server = _server(settings)
    record = server.record
    with record.alone():
        child = _loaded(record)
        record.write(child.pid, server.arguments)
    rig = Rig(settings)
    starting: asyncio.Task[Any] | None = None
    try:
        await asyncio.wait_for(rig.start(), 20)
        os.kill(child.pid, signal.SIGSTOP)
        with pytest.raises(EngineDied):
            await rig.engine.probe(0.5)
        await rig.engine.stop(5)
        if recovers:
            os.kill(child.pid, signal.SIGCONT)
        starting = asyncio.create_task(rig.start())
        if recovers:
            await asyncio.wait_for(starting, 20)
            assert record.running_pid() == child.pid
        else:
            await rig.until(lambda: record.running_pid() not in (0, child.pid), 20)
            assert not alive(child.pid)
    finally:
        if starting is not None:
            starting.cancel()
            await asyncio.wait([starting])
        await rig.close()
        record.end(0.0)
        child.kill()
        child.wait()


_WORKER = """
import asyncio, json, sys
from contract import settings
from gpu_workers import engines, guard
async def main():
    guard.protect("serve-test")
    engine = engines.create(settings.build({"engine": json.loads(sys.argv[1])}))
    await engine.start(None)
    print("up", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.vllm
@pytest.mark.timeout(600)
async def test_real_server_outlives_its_worker_answers_the_next_one_and_its_frozen_core_is_found(
    folder: Path, model_path: Path
) -> None:
    settings = _settings(folder, model_path)
    record = _server(settings).record
    arguments = json.dumps({name: getattr(settings.engine, name) for name in (
        "kind", "http_url", "http_serve", "http_serve_folder", "model_path", "max_model_len", "max_requests"
    )})  # fmt: skip
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _WORKER, arguments, stdout=subprocess.PIPE, cwd=_ROOT
    )
    try:
        assert worker.stdout is not None
        assert await asyncio.wait_for(worker.stdout.readline(), 300) == b"up\n", record.tail()
    finally:
        worker.kill()
        await worker.wait()
    pid = record.running_pid()
    assert pid

    rig = Rig(settings)
    try:
        await _use(rig, record, pid)
    finally:
        await rig.close()

    # A person ends it, core and all, frozen as it is.
    environment = contract_settings.environment(settings)
    assert f"process {pid}" in CliRunner().invoke(main, ["engine", "status"], env=environment).output
    assert "ended" in CliRunner().invoke(main, ["engine", "stop", "--timeout", "1"], env=environment).output
    assert _guardian.carriers(record.marker) == {}
    assert "ended" in CliRunner().invoke(main, ["engine", "status"], env=environment).output


async def _use(rig: Rig, record: http_server.Record, pid: int) -> None:
    # The next worker finds it, weights and all.
    info = await asyncio.wait_for(rig.start(), 20)
    assert record.running_pid() == pid
    assert (info.max_model_len, info.max_requests) == (256, 16)

    # One of each kind.
    chat = await rig.ask_one(input="hello", max_tokens=8, temperature=0, logprobs=True, top_logprobs=2)
    same = await rig.ask_one(messages=[{"role": "user", "content": "hello"}], max_tokens=8, temperature=0)
    assert chat.choices is not None
    assert same.choices is not None
    assert chat.choices[0]["message"] == same.choices[0]["message"]
    assert len(chat.choices[0]["logprobs"]["content"][0]["top_logprobs"]) == 2
    three = await rig.ask_one(prompt="a", n=3, seed=7, max_tokens=5, ignore_eos=True, min_tokens=5, top_k=9)
    assert three.choices is not None
    assert [choice["index"] for choice in three.choices] == [0, 1, 2]
    assert (three.usage.output_tokens, three.usage.contradictory) == (15, False)
    tokens = await rig.ask_one(prompt_token_ids=[20, 21, 22], max_tokens=10**6, ignore_eos=True)
    assert (tokens.usage.prompt_tokens, tokens.usage.output_tokens) == (3, 253)
    known = [20 + number % 50 for number in range(200)]
    await rig.ask_one(prompt_token_ids=known, max_tokens=2)
    assert (await rig.ask_one(prompt_token_ids=known, max_tokens=2)).usage.cached_tokens > 0
    wrongs = await rig.ask(
        parse(prompt="long " * 400), parse(prompt="x", logit_bias={"900000": 1}), parse(prompt_token_ids=[10**6])
    )
    codes = [answer.error.code for answer in wrongs if isinstance(answer, Completion)]  # type: ignore[union-attr]
    assert codes == ["context_length_exceeded", "invalid_request", "invalid_request"]

    # A cancelled request leaves the server; the probe finds it alive beside sixteen long ones.
    ids = rig.submit(*[Request(prompt="on", max_tokens=250, ignore_eos=True)] * 16)
    await rig.engine.probe(20)
    rig.engine.cancel(ids[:8])
    assert all(one.cancelled for one in await rig.wait(ids[:8]))
    assert all(one.error is None for one in await rig.wait(ids[8:]))
    assert rig.deaths == []

    # The core stops: health and models still answer, the probe tells.
    await rig.engine.probe(20)  # what was answered before is no sign of life any more
    (core,) = [one for one in _guardian.carriers(record.marker) if one != pid and _is_core(one)]
    os.kill(core, signal.SIGSTOP)
    with pytest.raises(EngineDied):
        await rig.engine.probe(2.0)
    await rig.engine.stop(5)
    assert record.running_pid() == pid, "not ours to end while it might recover"


def _is_core(pid: int) -> bool:
    return "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text() + Path(f"/proc/{pid}/comm").read_text()
