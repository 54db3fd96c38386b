"""The keeper of one engine, with an engine and a dispatcher of the test's own: how deaths and round trips meet."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import MagicMock

import msgspec

from contract.errors import EngineDied
from contract.metrics import Metrics
from contract.settings import Settings
from gpu_workers.engine import EngineInfo, EngineStats
from gpu_workers.keeper import EngineKeeper

_LONG_S = 60.0
_SOON_S = 5.0


class _Engine:
    """Comes up at once, refuses the warm-up; a round trip never comes back."""

    def __init__(self) -> None:
        self.starts = 0
        self.probed = asyncio.Event()
        self.started_again = asyncio.Event()
        self.given_up = 0

    async def start(self, listener: Any) -> EngineInfo:
        self.starts += 1
        if self.starts > 1:
            self.started_again.set()
        return EngineInfo(model="m", max_requests=1, max_model_len=16, kv_tokens=16, pids=())

    def prepare(self, requests: Any) -> list[Any]:
        return []

    def submit(self, jobs: Any) -> None:
        pass

    def stats(self) -> EngineStats:
        return EngineStats()

    async def probe(self, timeout_s: float) -> None:
        self.probed.set()
        try:
            await asyncio.sleep(timeout_s)
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        raise EngineDied("no sign of life")

    async def stop(self, timeout_s: float) -> None:
        pass


def _keeper(engine: _Engine, **over: float) -> EngineKeeper:
    settings = Settings()
    settings = msgspec.structs.replace(settings, engine=msgspec.structs.replace(settings.engine, **over))
    dispatcher = MagicMock()

    async def noted() -> None:
        pass

    dispatcher.deaths_noted = noted
    return EngineKeeper(
        settings,
        engine,  # type: ignore[arg-type]
        dispatcher=dispatcher,
        meter=MagicMock(),
        up=lambda: None,
        down=lambda _: None,
        metrics=Metrics({}),
    )


def test_death_during_a_round_trip_does_not_wait_for_its_answer() -> None:
    async def run() -> int:
        engine = _Engine()
        keeper = _keeper(engine, probe_interval_s=0.01, probe_timeout_s=_LONG_S)
        await keeper.start()
        watch = asyncio.ensure_future(keeper.watch())
        try:
            await asyncio.wait_for(engine.probed.wait(), _SOON_S)
            keeper.died(EngineDied("its process ended"))
            await asyncio.wait_for(engine.started_again.wait(), _SOON_S)
        finally:
            watch.cancel()
            await asyncio.wait([watch])
        return engine.given_up

    assert asyncio.run(run()) >= 1


def test_round_trip_that_does_not_come_back_is_a_death() -> None:
    async def run() -> None:
        engine = _Engine()
        keeper = _keeper(engine, probe_interval_s=0.01, probe_timeout_s=0.05)
        await keeper.start()
        watch = asyncio.ensure_future(keeper.watch())
        try:
            await asyncio.wait_for(engine.started_again.wait(), _SOON_S)
        finally:
            watch.cancel()
            await asyncio.wait([watch])

    asyncio.run(run())
