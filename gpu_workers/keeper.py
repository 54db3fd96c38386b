"""Keeps one engine alive: starts it, warms it up, makes round trips to its core, starts it anew when it died.

It is the engine's ``Listener``: what ends during warm-up is its own, everything later goes to the
dispatcher.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from contract import logs
from contract.errors import EngineDied, FatalError, InvalidRequest
from contract.messages import Request
from contract.metrics import Metrics
from contract.settings import Settings
from contract.statuses import WorkerState
from gpu_workers.dispatcher import Dispatcher
from gpu_workers.engine import Completion, Engine, EngineInfo, Job
from gpu_workers.metering import Meter

_BACKOFF_S = (0.5, 1.0, 2.0, 5.0, 15.0, 30.0)
_STOP_S = 10.0
_WARM_UP_TIMEOUT_S = 120.0
_WARM_UP = (
    Request(prompt="warm up", max_tokens=8, temperature=0.0),
    Request(prompt="warm up " * 24, max_tokens=8),
    # The first request with log-probabilities makes vLLM compile for seconds; better now than under traffic.
    Request(prompt="warm up", max_tokens=2, logprobs=1),
)


class EngineKeeper:
    """One owner of the engine's life, on the event loop's thread.

    Args:
        up: told when work may flow (again).
        down: told the reason when it may not.
    """

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        *,
        dispatcher: Dispatcher,
        meter: Meter,
        up: Callable[[], None],
        down: Callable[[str], None],
        metrics: Metrics,
    ) -> None:
        self._settings = settings.engine
        self._engine = engine
        self._dispatcher = dispatcher
        self._meter = meter
        self._up = up
        self._down = down
        self._metrics = metrics
        self._warming: dict[int, asyncio.Future[Completion]] | None = None
        self._death = asyncio.Event()
        self._log = logs.get("gpu_workers")

    # -- Listener ---------------------------------------------------------------------------------

    def finished(self, completions: Sequence[Completion]) -> None:
        """Warm-up answers end here; all others are the dispatcher's."""
        if self._warming is None:
            self._dispatcher.finished(completions)
            return
        for completion in completions:
            waiter = self._warming.get(completion.job_id)
            if waiter is not None and not waiter.done():
                waiter.set_result(completion)

    def died(self, error: EngineDied) -> None:
        """The engine said so, or its round trip did not come back."""
        if self._death.is_set():
            return
        self._death.set()
        for waiter in (self._warming or {}).values():
            if not waiter.done():
                waiter.set_exception(error)
        if self._warming is None:
            self._meter.become(WorkerState.STALLED, time.monotonic_ns())
            self._metrics.set("headrace_engine_up", 0)
            self._metrics.count("headrace_engine_deaths_total")
            self._down(str(error))
            self._dispatcher.died(error)

    # -- life -------------------------------------------------------------------------------------

    async def start(self) -> EngineInfo:
        """Starts and warms up; work flows afterwards. Raises ``FatalError`` with what to do."""
        started_s = time.monotonic()
        self._death.clear()
        self._warming = {}
        try:
            info = await self._engine.start(self)
            loaded_s = time.monotonic()
            await self._warm_up()
        finally:
            self._warming = None
        self._log.info(
            "engine.up",
            model=info.model,
            max_requests=info.max_requests,
            kv_tokens=info.kv_tokens,
            pids=list(info.pids),
            load_s=round(loaded_s - started_s, 1),
            warm_up_s=round(time.monotonic() - loaded_s, 1),
        )
        self._meter.become(WorkerState.IDLE, time.monotonic_ns())
        self._metrics.set("headrace_engine_up", 1)
        self._dispatcher.opened(info)
        self._up()
        return info

    async def _warm_up(self) -> None:
        assert self._warming is not None
        jobs = []
        loop = asyncio.get_running_loop()
        for index, prepared in enumerate(self._engine.prepare(_WARM_UP)):
            if isinstance(prepared, InvalidRequest):
                self._log.warning("engine.warm_up_refused", error=prepared.message)
                continue
            jobs.append(Job(-1 - index, prepared))
            self._warming[-1 - index] = loop.create_future()
        waiters = list(self._warming.values())
        self._engine.submit(jobs)
        try:
            for completion in await asyncio.wait_for(asyncio.gather(*waiters), _WARM_UP_TIMEOUT_S):
                if isinstance(completion.error, InvalidRequest):  # an endpoint that has no log-probabilities, say
                    self._log.warning("engine.warm_up_refused", error=completion.error.message)
                elif completion.error is not None:
                    raise FatalError(f"the engine failed its warm-up: {completion.error}") from completion.error
        except TimeoutError:
            raise FatalError(f"the engine gave no answer to its warm-up within {_WARM_UP_TIMEOUT_S:.0f} s") from None

    async def watch(self) -> None:
        """Runs until cancelled: round trips while it lives, restarts when it died."""
        while True:
            await self._watch_life()
            await self._engine.stop(_STOP_S)
            await self._dispatcher.deaths_noted()
            await self._restart()

    async def _watch_life(self) -> None:
        death: asyncio.Task[Any] = asyncio.create_task(self._death.wait())
        try:
            while not death.done():
                await asyncio.wait([death], timeout=self._settings.probe_interval_s)
                if not death.done():
                    await self._probe(death)
                self._metrics.set("headrace_engine_kv_usage", self._engine.stats().kv_usage)
        finally:
            death.cancel()

    async def _probe(self, death: asyncio.Task[Any]) -> None:
        """One round trip. A death meanwhile ends the wait: the answer of a dead core would only time out."""
        probe: asyncio.Task[Any] = asyncio.create_task(self._engine.probe(self._settings.probe_timeout_s))
        try:
            await asyncio.wait([probe, death], return_when=asyncio.FIRST_COMPLETED)
            if probe.done():
                probe.result()
        except EngineDied as error:
            self.died(error)
        finally:
            probe.cancel()

    async def _restart(self) -> None:
        for attempt in range(10**9):
            try:
                await self.start()
                return
            except FatalError as error:
                pause_s = _BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)]
                self._log.error("engine.restart_failed", error=str(error), next_try_s=pause_s)
                await self._engine.stop(_STOP_S)
                await asyncio.sleep(pause_s)

    async def stop(self, timeout_s: float) -> None:
        """Ends the engine; nothing of it is left."""
        self._metrics.set("headrace_engine_up", 0)
        await self._engine.stop(timeout_s)
