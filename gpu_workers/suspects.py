"""Requests that may kill engines, written down where every worker sees them.

Deaths are counted per request, across workers and restarts. A request enters on the list when the engine
died with it inside, or when a worker died that held it. From then on it is *marked* before it enters an
engine, so that the next death counts for those that were really inside, and only for them:

- delivery 1: the engine or the worker dies; who was inside (engine) or in hand (worker) has one death;
- delivery 2: marked; another death counts for the marked ones, neighbours that were answered are off the list;
- delivery 3: with two deaths it runs alone; if it kills again, it is dead-lettered and nobody else is blamed.

While Postgres is away nothing can be written down: requests run unmarked, and a death then counts only in
the worker that saw it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from consumers.item import Item
from contract import logs
from contract.errors import HeadraceError
from storage.store import Store


class Suspects:
    """The worker's view of the list. Event loop only; never raises for a database that is away."""

    def __init__(self, store: Store, worker_epoch: int) -> None:
        self._store = store
        self._worker_epoch = worker_epoch
        self._survivors: list[str] = []
        self._log = logs.get("gpu_workers")

    def survived(self, item: Item) -> None:
        """It left the engine and the engine lives: the next death is not its doing, settled or not."""
        self._survivors.append(item.key)

    async def mark(self, items: Sequence[Item]) -> None:
        """Writes down that these are about to enter this worker's engine, and who has left it since."""
        await self._write(items, self._worker_epoch)

    async def note_deaths(self, items: Sequence[Item]) -> None:
        """Writes down how many deaths these have seen; they are in no engine now."""
        await self._write(items, None)

    async def _write(self, items: Sequence[Item], epoch: int | None) -> None:
        deaths = {item.key: item.deaths for item in items}
        if not deaths:
            return
        survivors, self._survivors = [key for key in self._survivors if key not in deaths], []
        try:
            await asyncio.to_thread(self._store.write_suspects, deaths, epoch, survivors)
        except HeadraceError as error:
            self._log.warning("suspects.not_written", requests=len(deaths), error=str(error))
