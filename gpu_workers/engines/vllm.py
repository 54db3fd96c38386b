"""The vLLM engine: AsyncLLM in this process, its core in a process of its own, refilled request by request.

``vllm_profile`` sets it up, ``vllm_params`` makes requests ready, ``vllm_life`` feeds one core from start
to death, ``vllm_output`` shapes answers. vLLM is imported by ``start``, off the loop.
"""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
import threading
from collections.abc import Collection, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from contract.errors import EngineDied, FatalError, InvalidRequest
from contract.messages import Request
from contract.settings import Settings
from gpu_workers.engine import EngineInfo, EngineStats, Job, Listener, Prepared
from gpu_workers.engines import vllm_profile
from gpu_workers.engines.vllm_life import Life, Tap
from gpu_workers.engines.vllm_params import Preparer

_DISPOSE_S = 5.0


class VllmEngine:
    """Implements ``Engine``."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings.engine
        self._pool = settings.pools[settings.worker.pool]
        self._preparer: Preparer | None = None
        self._life: Life | None = None
        self._building: asyncio.Future[tuple[Any, Tap]] | None = None
        self._abandoned = threading.Event()

    async def start(self, listener: Listener) -> EngineInfo:
        arguments = vllm_profile.engine_arguments(self._settings)
        await self.stop(_DISPOSE_S)  # what is left of an earlier life
        self._abandoned.clear()
        self._building = asyncio.ensure_future(self._build_off_the_loop(arguments))
        try:
            llm, tap = await asyncio.shield(self._building)
            self._life, self._building = Life(llm, tap), None
            return await self._life.open(listener, self._pool.model)
        except FatalError:
            raise
        except Exception as error:
            raise FatalError(
                f"vLLM did not start with engine.model_path = {self._settings.model_path!r}: {error!r} "
                "(the core's own reason stands above in the log; engine.vllm overrides any argument)"
            ) from error

    async def _build_off_the_loop(self, arguments: dict[str, Any]) -> tuple[Any, Tap]:
        # Two calls: exceptions that vLLM's imports keep for ever hold the frames above them, which must
        # not be those that hold an engine.
        await asyncio.to_thread(_import_vllm)
        return await asyncio.to_thread(self._build, arguments)

    def _build(self, arguments: dict[str, Any]) -> tuple[Any, Tap]:
        """Builds the engine; its core loads the model meanwhile. Seconds to minutes."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        engine_args = AsyncEngineArgs(**arguments)
        config = engine_args.create_engine_config()
        self._must_be_wanted()
        tap = Tap()
        with vllm_profile.deaf_to_interrupt(), vllm_profile.cores_from_fork_server():
            llm = AsyncLLM.from_vllm_config(
                config, stat_loggers=[lambda *_, **__: tap], disable_log_stats=engine_args.disable_log_stats
            )
        try:
            self._must_be_wanted()
            if self._preparer is None:
                self._preparer = Preparer(
                    llm.vllm_config,
                    llm.renderer.get_tokenizer(),
                    model=self._pool.model,
                    default_max_tokens=self._pool.default_max_tokens,
                )
        except BaseException:
            llm.shutdown(timeout=0)
            raise
        return llm, tap

    def _must_be_wanted(self) -> None:
        if self._abandoned.is_set():
            raise FatalError("the engine was stopped while it started")

    def prepare(self, requests: Sequence[Request]) -> list[Prepared | InvalidRequest]:
        if self._preparer is None:
            raise FatalError("prepare needs the tokenizer: start the engine first")
        return self._preparer.prepare(requests)

    def submit(self, jobs: Sequence[Job]) -> None:
        if self._life is not None:
            self._life.submit(jobs)

    def cancel(self, job_ids: Collection[int]) -> None:
        if self._life is not None:
            self._life.cancel(job_ids)

    def stats(self) -> EngineStats:
        return self._life.stats() if self._life is not None else EngineStats()

    async def probe(self, timeout_s: float) -> None:
        if self._life is None:
            raise EngineDied("the engine is not running")
        await self._life.probe(timeout_s)

    async def stop(self, timeout_s: float) -> None:
        deadline = asyncio.get_running_loop().time() + timeout_s
        life, self._life = self._life, None
        if life is not None:
            await life.end(timeout_s)
        building, self._building = self._building, None
        if building is not None:
            await self._end_building(building, deadline)

    async def _end_building(self, building: asyncio.Future[tuple[Any, Tap]], deadline: float) -> None:
        """Ends a start that was given up: its thread cannot be stopped, but the core it waits for can."""
        self._abandoned.set()
        loop = asyncio.get_running_loop()
        while not building.done() and loop.time() < deadline:
            _kill_cores()
            await asyncio.wait([building], timeout=0.1)
        if building.done() and building.exception() is None:
            await Life(*building.result()).end(0.0)
        for core in _kill_cores():
            await asyncio.to_thread(core.join, _DISPOSE_S)


def _kill_cores() -> list[BaseProcess]:
    """Kills the cores that this process started, one engine's; those that were alive."""
    cores = [process for process in multiprocessing.active_children() if process.name.startswith("EngineCore")]
    for core in cores:
        core.kill()
    return cores


def _import_vllm() -> None:
    """Imports vLLM, here and in the fork server at the same time."""
    vllm_profile.set_environment()
    with vllm_profile.deaf_to_interrupt():
        vllm_profile.start_fork_server()
    importlib.import_module("vllm.v1.engine.async_llm")
