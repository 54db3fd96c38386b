"""One rig for every engine: a listener that keeps what it hears, questions, and violence."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import time
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from contract.errors import EngineDied, InvalidRequest
from contract.messages import Request, parse_request
from contract.settings import Settings
from gpu_workers import engines
from gpu_workers.engine import Completion, EngineInfo, Job, Prepared
from gpu_workers.engines.simulated import SimulatedEngine
from tests.integration.http_endpoint import HttpEndpoint

Answer = Completion | InvalidRequest

_ANSWER_S = 60.0


def parse(**fields: Any) -> Request | InvalidRequest:
    """A request as it would come off a topic: through JSON and the contract's checks."""
    parsed = parse_request(json.dumps(fields).encode())
    return parsed.request if parsed.error is None else parsed.error


class Rig:
    """An engine and its listener."""

    def __init__(self, settings: Settings) -> None:
        self.engine = engines.create(settings)
        self.kind = settings.engine.kind
        self.model = settings.pools[settings.worker.pool].model
        self.max_model_len = settings.engine.max_model_len
        self.heard: dict[int, Completion] = {}
        self.twice: list[int] = []
        self.deaths: list[EngineDied] = []
        self.info: EngineInfo | None = None
        self.up = False
        """Started, and not stopped since; it may have died."""
        self.endpoint: HttpEndpoint | None = None
        """What an http engine speaks to, on the port that its settings name."""
        if self.kind == "http" and not settings.engine.http_serve:
            simulated = msgspec.structs.replace(settings.engine, kind="simulated")
            self.endpoint = HttpEndpoint(msgspec.structs.replace(settings, engine=simulated))
            self.endpoint.port = urllib.parse.urlsplit(settings.engine.http_url).port or 0
            self._endpoint_up = False
        self._news = asyncio.Event()
        self._numbers = itertools.count(1)

    # -- Listener ---------------------------------------------------------------------------------

    def finished(self, completions: Sequence[Completion]) -> None:
        for completion in completions:
            if completion.job_id in self.heard:
                self.twice.append(completion.job_id)
            self.heard[completion.job_id] = completion
        self._news.set()

    def died(self, error: EngineDied) -> None:
        self.deaths.append(error)
        self._news.set()

    # -- questions --------------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        self.deaths.clear()
        if self.endpoint is not None and not self._endpoint_up:
            await self.endpoint.start()
            self._endpoint_up = True
        self.info = await self.engine.start(self)
        self.up = True
        return self.info

    async def stop(self, timeout_s: float) -> None:
        self.up = False
        await self.engine.stop(timeout_s)

    def submit(self, *requests: Request, priority: int = 0) -> list[int]:
        """Hands over requests that must be right; their job ids."""
        jobs = []
        for prepared in self.engine.prepare(requests):
            assert isinstance(prepared, Prepared), prepared
            jobs.append(Job(next(self._numbers), prepared, priority))
        self.engine.submit(jobs)
        return [job.job_id for job in jobs]

    async def wait(self, job_ids: Sequence[int], timeout_s: float = _ANSWER_S) -> list[Completion]:
        """The completions of these jobs, in this order."""
        deadline = time.monotonic() + timeout_s
        while not self.heard.keys() >= set(job_ids):
            assert not self.deaths, f"the engine died: {self.deaths}"
            missing = set(job_ids) - self.heard.keys()
            assert time.monotonic() < deadline, f"up: {self.up}, {self.engine.stats()}, no answer to {missing}"
            await self._some_news(deadline)
        return [self.heard[job_id] for job_id in job_ids]

    async def wait_for_death(self, timeout_s: float) -> EngineDied:
        deadline = time.monotonic() + timeout_s
        while not self.deaths:
            assert time.monotonic() < deadline, f"up: {self.up}, {self.engine.stats()}, no death"
            await self._some_news(deadline)
        return self.deaths[0]

    async def _some_news(self, deadline: float) -> None:
        self._news.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), max(0.01, deadline - time.monotonic()))

    async def until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Waits for ``condition``, with a deadline."""
        deadline = time.monotonic() + timeout_s
        while True:
            if condition():
                return
            assert time.monotonic() < deadline, "it did not come to pass"
            await asyncio.sleep(0.005)

    async def ask(self, *requests: Request | InvalidRequest) -> list[Answer]:
        """What becomes of requests handed over together, in their order: an answer or a refusal."""
        good = [request for request in requests if isinstance(request, Request)]
        prepared = iter(self.engine.prepare(good))
        fates = [next(prepared) if isinstance(request, Request) else request for request in requests]
        jobs = [Job(next(self._numbers), fate) for fate in fates if isinstance(fate, Prepared)]
        self.engine.submit(jobs)
        answers = iter(await self.wait([job.job_id for job in jobs]))
        return [next(answers) if isinstance(fate, Prepared) else fate for fate in fates]

    async def ask_one(self, **fields: Any) -> Completion:
        """The answer to one request that must be answered."""
        (answer,) = await self.ask(parse(**fields))
        assert isinstance(answer, Completion), answer
        assert answer.error is None, answer.error
        return answer

    async def close(self) -> None:
        """The engine ends, and the endpoint if there is one."""
        await self.stop(10)
        if self.endpoint is not None:
            await self.endpoint.stop()

    # -- violence ---------------------------------------------------------------------------------

    def kill(self) -> None:
        """The core ends without a word."""
        self._endpoint_up = False
        if self.endpoint is not None:
            self._killing = asyncio.get_running_loop().create_task(self.endpoint.stop())
        elif isinstance(self.engine, SimulatedEngine):
            asyncio.get_running_loop().call_soon(self.engine.die)
        else:
            self._signal(signal.SIGKILL)

    def freeze(self) -> None:
        """The core stops in its tracks."""
        self._endpoint_up = False
        if self.endpoint is not None:
            self.endpoint.engine.hang()
        elif isinstance(self.engine, SimulatedEngine):
            self.engine.hang()
        else:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        assert self.info is not None
        os.kill(self.info.pids[0], number)


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
