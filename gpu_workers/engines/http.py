"""The http engine: any OpenAI-compatible endpoint, one connection per request.

``http_params`` makes requests ready, ``http_endpoint`` asks, ``http_life`` feeds one endpoint until it dies,
``http_output`` reads answers, ``http_server`` keeps a vLLM server beside the workers. The endpoint is not
ours to end: ``stop`` closes the connections and leaves it, and a server of ours, running.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from contract.errors import EngineDied, FatalError, InvalidRequest
from contract.messages import Request
from contract.settings import Settings
from gpu_workers.engine import EngineInfo, EngineStats, Job, Listener, Prepared
from gpu_workers.engines.http_endpoint import Endpoint, Introduction, Unreachable
from gpu_workers.engines.http_life import Life
from gpu_workers.engines.http_params import Preparer
from gpu_workers.engines.http_server import Server

_ASK_AGAIN_S = 0.5
_RECOVERY_S = 5.0


class HttpEngine:
    """Implements ``Engine``."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings.engine
        pool = settings.pools[settings.worker.pool]
        self._model = pool.model
        self._model_there = self._settings.http_model or pool.model
        self._preparer = Preparer(pool, model=self._model_there, max_model_len=self._settings.max_model_len)
        self._server = Server(self._settings, self._model_there) if self._settings.http_serve else None
        self._server_pid = 0
        """The server that our last life spoke to; 0: none."""
        self._suspect = False
        """It was seen dead or silent."""
        self._life: Life | None = None
        self._was_up = False

    async def start(self, listener: Listener) -> EngineInfo:
        await self.stop(0)
        endpoint = Endpoint(self._settings, self._model_there)
        try:
            introduction = await self._reach(endpoint)
        except BaseException:
            await endpoint.close()
            raise
        self._was_up = True
        length = min(self._settings.max_model_len, introduction.max_model_len or self._settings.max_model_len)
        self._preparer.dialect, self._preparer.paths = introduction.dialect, introduction.paths
        self._preparer.max_model_len = length
        kv_tokens = self._settings.kv_tokens or self._settings.slots * length
        self._life = Life(
            endpoint,
            listener,
            dialect=introduction.dialect,
            check_timeout_s=self._settings.probe_timeout_s,
            kv_tokens=kv_tokens,
        )
        return EngineInfo(self._model, self._settings.slots, length, kv_tokens)

    async def _reach(self, endpoint: Endpoint) -> Introduction:
        """Asks until the endpoint answers. One that never did, and is not ours to start, is not waited for."""
        settings = self._settings
        if self._server is not None:
            suspect = self._server_pid if self._suspect and not await _recovers(endpoint) else 0
            self._server_pid = await asyncio.to_thread(self._server.ensure, suspect)
            self._suspect = False
        deadline = asyncio.get_running_loop().time() + settings.http_start_timeout_s
        while True:
            left_s = deadline - asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(settings.probe_timeout_s):
                    return await endpoint.introduce()
            except (Unreachable, TimeoutError) as error:
                reason = str(error) or "silence"
                again_s = error.again_s if isinstance(error, Unreachable) else None
                if self._server is None and not self._was_up and again_s is None:
                    raise FatalError(
                        f"no endpoint answers at engine.http_url = {settings.http_url}: {reason}; "
                        "start it, or let the worker start vLLM's server by engine.http_serve"
                    ) from error
                if left_s <= 0:
                    self._suspect = True  # a server of ours that never comes up is started anew next time
                    text = f"{settings.http_url} did not come up within {settings.http_start_timeout_s:g} s: {reason}"
                    raise FatalError(text) from error
            if self._server is not None:
                self._server.must_run()
            await asyncio.sleep(min(max(again_s or 0.0, _ASK_AGAIN_S), max(left_s, _ASK_AGAIN_S)))

    def prepare(self, requests: Sequence[Request]) -> list[Prepared | InvalidRequest]:
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
            raise EngineDied("the endpoint is not in use")
        try:
            await self._life.probe(timeout_s)
        except EngineDied:
            self._suspect = True
            raise

    async def stop(self, timeout_s: float) -> None:
        life, self._life = self._life, None
        if life is not None:
            self._suspect = self._suspect or life.over
            await life.end()


async def _recovers(endpoint: Endpoint) -> bool:
    """Whether a server that was seen in trouble answers after all: its weights are worth asking once more."""
    try:
        async with asyncio.timeout(_RECOVERY_S):
            await endpoint.introduce()
    except (Unreachable, TimeoutError, FatalError):
        return False
    return True
