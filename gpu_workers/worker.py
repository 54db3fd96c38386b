"""The worker process: intake → admission → dispatcher → settlement, and its life from start to drain.

Threads, one owner each: per topic an *intake* (its consumer), per class an *admission* (its windows); the
*event loop* (engine, credits, meter); *settlement* (transactions); *publishing* (the producer); *health* (HTTP).

Life: starting (register, load, warm up) → serving ⇄ stalled (the engine died and starts again; the
intake holds) → draining (told to stop; one deadline for all of it) → ended. A second signal aborts.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import signal
import socket
import time

import psutil

from broker.publisher import Publisher
from consumers.admission import Admission
from consumers.in_hand import InHand, by_class
from consumers.intake import Batch, Intake
from consumers.item import Desk, Item, Outcome
from consumers.publishing import LINGER_MS, Publishing
from consumers.settlement import Settler
from contract import logs
from contract.errors import Fenced, HeadraceError, StorageDown
from contract.metrics import OTHER, Metrics
from contract.settings import Settings
from contract.statuses import Status, WorkerState
from gpu_workers import engines, guard
from gpu_workers.dispatcher import Dispatcher
from gpu_workers.health import HealthServer
from gpu_workers.keeper import EngineKeeper
from gpu_workers.metering import Meter
from gpu_workers.suspects import Suspects
from storage.rows import TimeRow
from storage.store import Store

EXIT_OK = 0
EXIT_ABORTED = 1
EXIT_FENCED = 75
"""Another worker declared this one dead; a supervisor starts it anew (EX_TEMPFAIL)."""

_COLLECT_AFTER = 50_000
"""Objects more than before: above what the requests in flight make, so that a look finds garbage, not them."""
_SWEEP_S = 0.1
_TARIFF_EVERY_S = 30.0
_REGISTER_RETRY_S = 1.0
_PING_S = 3.0
_SAME_SIGNAL_S = 0.5
"""Some supervisors signal a process and its group: the same signal again within this time is the same wish."""
_LIVE_S = 30.0
"""The loop counts as stuck when it has not turned for this long; loading a model may hold it for seconds."""
_ENGINE_STOP_S = 10.0
_STORAGE_LATE_S = 5.0
"""Without a heartbeat in Postgres for this long it is not ready, however long a transaction may still be tried."""
_REASONS = (
    "tombstone", "empty_value", "invalid_json", "not_an_object", "engine_death", "inference_timeout", "engine_error",
    "deadlock", "serialization", "connection", "timeout", OTHER,
)  # fmt: skip


def _calm_collector() -> None:
    """Python's cycle collector, set for many short-lived requests: what start-up left is never looked at again, and
    requests in flight, which hold no cycles, do not set it off."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, 20, 50)


def process_start_ns() -> int:
    """When this process started, on the scale of ``time.monotonic_ns``."""
    age_s = time.time() - psutil.Process().create_time()
    return time.monotonic_ns() - int(max(0.0, age_s) * 1e9)


class Worker:
    """One worker; ``run`` once."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._name = settings.worker.name or f"{socket.gethostname()}-{os.getpid()}"
        self._log = logs.get("gpu_workers").bind(worker=self._name)
        self._metrics = Metrics(
            {
                "class": settings.classes,
                "bucket": settings.buckets.edges,
                "status": list(Status),
                "state": list(WorkerState),
                "kind": ["prompt", "cached", "output"],
                "reason": _REASONS,
            }
        )
        self._store = Store(
            settings.postgres,
            on_retry=lambda reason: self._metrics.count("headrace_settle_retries_total", reason),
        )
        self._health = HealthServer(
            settings.worker.http_port, live=self._not_live, ready=self._not_ready, registry=self._metrics.registry
        )
        self._intakes: dict[tuple[str, str], Intake] = {}
        self._admissions: dict[str, Admission] = {}
        self._phase = "starting"
        self._signalled_s = 0.0
        self._turned_s = self._beaten_s = time.monotonic()
        self._broken: BaseException | None = None
        self._unsent: TimeRow | None = None

    # -- life -------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Serves until a signal, a fence or a fault ends it; the process's exit code.

        Raises ``FatalError`` when the engine cannot start at all.
        """
        self._loop = asyncio.get_running_loop()
        self._stop_asked = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number)
        watch = guard.protect(self._name)
        self._health.start()
        self._log.info("worker.starting", http_port=self._health.port, pid=os.getpid())
        try:
            epoch = await self._register()
            if epoch is None:
                return EXIT_OK
            await self._assemble(epoch)
            return await self._live()
        finally:
            self._health.stop()
            self._store.close()
            watch.release()

    async def _register(self) -> int | None:
        """This worker's epoch, waiting for Postgres as long as it takes; None: told to stop first."""
        started_ms = int(time.time() * 1000)
        while not self._stop_asked.is_set():
            try:
                await asyncio.to_thread(self._store.ping, _PING_S)
                await asyncio.to_thread(self._store.seed_prices, self._settings.cost)
                await asyncio.to_thread(self._store.make_partitions)
                return await asyncio.to_thread(
                    lambda: self._store.register_worker(
                        name=self._name,
                        pool=self._settings.worker.pool,
                        gpu_kind=self._settings.cost.gpu_kind,
                        started_ms=started_ms,
                    )
                )
            except StorageDown as error:
                self._log.warning("worker.waits_for_postgres", error=str(error))
                await asyncio.sleep(_REGISTER_RETRY_S)
        return None

    async def _assemble(self, epoch: int) -> None:
        settings = self._settings
        engine = engines.create(settings)
        self._desk = Desk(self._name, epoch)
        self._meter = Meter(epoch, process_start_ns())
        self._in_hand = InHand(self._readmit)
        model = settings.pools[settings.worker.pool].model
        self._dispatcher = Dispatcher(
            settings,
            engine,
            desk=self._desk,
            in_hand=self._in_hand,
            suspects=Suspects(self._store, epoch),
            meter=self._meter,
            settle=self._settle,
            tariff=await asyncio.to_thread(self._store.tariff, model, int(time.time() * 1000)),
            metrics=self._metrics,
        )
        self._publishing = Publishing(
            settings,
            publisher=Publisher(settings, linger_ms=LINGER_MS),
            in_hand=self._in_hand,
            hold=self._hold,
            release=self._release,
            failed=self._fail,
        )
        self._settler = Settler(
            settings, store=self._store, publish=self._publishing.put, failed=self._fail, metrics=self._metrics
        )
        self._keeper = EngineKeeper(
            settings,
            engine,
            dispatcher=self._dispatcher,
            meter=self._meter,
            up=lambda: self._release("engine"),
            down=lambda _: self._hold("engine"),
            metrics=self._metrics,
        )

    async def _live(self) -> int:
        heart = asyncio.create_task(self._beat())
        tasks = [heart, asyncio.create_task(self._sweep())]
        try:
            starting = asyncio.create_task(self._keeper.start())
            stopping = asyncio.create_task(self._stop_asked.wait())
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
            else:
                await starting  # raises when the engine cannot start
                self._open()
                tasks.append(asyncio.create_task(self._keeper.watch()))
                await stopping
        finally:
            code = await self._end(tasks)
        return code

    def _open(self) -> None:
        """The engine is warm: only now does this worker join the groups."""
        _calm_collector()
        self._settler.start()
        self._publishing.start()
        for name in self._settings.worker_classes:
            admission = self._admissions[name] = Admission(
                self._settings,
                name,
                store=self._store,
                desk=self._desk,
                in_hand=self._in_hand,
                deliver=self._dispatcher.deliver,
                settle=self._settle,
                failed=self._fail,
                metrics=self._metrics,
            )
            admission.start()
            for bucket in self._settings.buckets.edges:
                intake = self._intakes[name, bucket] = Intake(
                    self._settings,
                    name,
                    bucket,
                    sink=admission.put,
                    hungry=functools.partial(self._dispatcher.hungry, name, bucket),
                    released=self._dispatcher.released,
                    forgotten=admission.forget,
                    failed=self._fail,
                    metrics=self._metrics,
                )
                intake.start()
        self._phase = "serving"
        self._log.info("worker.serving", classes=list(self._admissions), epoch=self._desk.worker_epoch)

    async def _end(self, tasks: list[asyncio.Task[None]]) -> int:
        """Each step stands before what it feeds; one deadline bounds them all."""
        self._phase = "draining"
        broken = self._broken
        deadline = time.monotonic() + (0.0 if broken else self._settings.worker.drain_timeout_s)
        # 1. Pull no more; the intakes stay to commit what still becomes durable.
        for intake in self._intakes.values():
            intake.stop(deadline)
        # 2. Drop what waits, let the engine finish what it holds, keeping time for the steps below.
        for task in tasks[2:]:
            task.cancel()  # no restart from here on
        if self._intakes:
            reserve_s = min(2.0, self._settings.worker.drain_timeout_s / 4)
            await self._dispatcher.drain(deadline - reserve_s)
            # 3. Everything taken is settled or dropped now: the intakes commit and leave the group.
            for intake in self._intakes.values():
                await asyncio.to_thread(intake.join, max(1.0, deadline - time.monotonic() + 1.0))
            for admission in self._admissions.values():
                admission.stop()
            # 4. The last outcomes go out.
            await asyncio.to_thread(self._settler.stop, deadline)
            await asyncio.to_thread(self._publishing.stop, deadline)
        self._meter.become(WorkerState.DRAINING, time.monotonic_ns())
        # 5. No process of the engine is left.
        await self._keeper.stop(_ENGINE_STOP_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # 6. The ledger ends with the process.
        if not isinstance(broken, Fenced):
            await self._close_ledger()
        self._log.info("worker.ended", fault=repr(broken) if broken else None)
        return EXIT_FENCED if isinstance(broken, Fenced) else EXIT_ABORTED if broken else EXIT_OK

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._stop_asked.is_set():
            if time.monotonic() - self._signalled_s < _SAME_SIGNAL_S:
                return
            self._log.warning("worker.aborted", signal=name)
            os._exit(EXIT_ABORTED)  # the guard ends the engine
        self._log.info("worker.stop_asked", signal=name)
        self._signalled_s = time.monotonic()
        self._stop_asked.set()

    # -- between the parts ------------------------------------------------------------------------

    def _settle(self, outcomes: list[Outcome]) -> None:
        self._settler.put(outcomes)

    def _readmit(self, items: list[Item]) -> None:
        """Followers whose leader is gone are judged again, as a window of their own."""
        for name, group in by_class(items).items():
            self._admissions[name].put(Batch(group, []))

    def _hold(self, reason: str) -> None:
        for intake in self._intakes.values():
            intake.hold(reason)

    def _release(self, reason: str) -> None:
        for intake in self._intakes.values():
            intake.release(reason)

    def _fail(self, error: BaseException) -> None:
        """A part of this worker is broken: it ends; what it holds is delivered again. Any thread."""
        if self._broken is None:
            self._broken = error
            self._log.error("worker.failed", error=repr(error))
            self._loop.call_soon_threadsafe(self._stop_asked.set)

    # -- clockwork --------------------------------------------------------------------------------

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self._turned_s = time.monotonic()
            self._dispatcher.sweep()

    async def _beat(self) -> None:
        """Each second: time by state and a heartbeat in one transaction. Unsent time stays in the meter."""
        steady_since = time.monotonic()
        tariff_at = time.monotonic() + _TARIFF_EVERY_S
        dead_after_s = self._settings.worker.dead_after_s
        while True:
            await asyncio.sleep(self._settings.worker.heartbeat_s)
            try:
                await self._send_time(self._store.beat)
                self._metrics.set("headrace_storage_up", 1)
                now = self._beaten_s = time.monotonic()
                if now - steady_since > dead_after_s:
                    # Only who has beaten through may call another dead: after an outage of Postgres
                    # everybody's heartbeat is old.
                    await asyncio.to_thread(self._store.reap, dead_after_s)
                if now > tariff_at:
                    tariff_at = now + _TARIFF_EVERY_S
                    model = self._settings.pools[self._settings.worker.pool].model
                    self._dispatcher.price_by(
                        await asyncio.to_thread(self._store.tariff, model, int(time.time() * 1000))
                    )
            except Fenced as error:
                self._fail(error)
                return
            except HeadraceError as error:
                steady_since = time.monotonic()
                self._metrics.set("headrace_storage_up", 0)
                self._log.warning("worker.beat_failed", error=str(error))

    async def _send_time(self, send: object) -> None:
        if self._unsent is None:
            row = self._unsent = self._meter.flush(time.monotonic_ns(), int(time.time() * 1000))
            self._unsent_provisioned_ns = self._meter.provisioned_ns()
            self._unsent_waste = self._dispatcher.orphans.take()
            for state in WorkerState:
                self._metrics.count("headrace_worker_seconds_total", state, by=getattr(row, f"{state}_ns", 0) / 1e9)
        await asyncio.to_thread(send, self._unsent, self._unsent_provisioned_ns, self._unsent_waste)  # type: ignore[arg-type]
        self._unsent = None

    async def _close_ledger(self) -> None:
        try:
            if self._unsent is not None:
                await self._send_time(self._store.beat)
            await self._send_time(self._store.close_worker)
        except HeadraceError as error:
            self._log.warning("worker.ledger_not_closed", error=str(error))

    # -- health -----------------------------------------------------------------------------------

    def _not_live(self) -> list[str]:
        if self._phase == "serving" and time.monotonic() - self._turned_s > _LIVE_S:
            return [f"the event loop has not turned for {time.monotonic() - self._turned_s:.0f} s"]
        return []

    def _not_ready(self) -> list[str]:
        if self._phase != "serving":
            return [self._phase]
        reasons = {reason for intake in self._intakes.values() for reason in intake.holds}
        waiting = [f"{name}.{bucket}" for (name, bucket), intake in self._intakes.items() if not intake.joined]
        reasons |= {f"not yet in the group of {topic}" for topic in waiting}
        if not self._settler.storage_up or time.monotonic() - self._beaten_s > _STORAGE_LATE_S:
            reasons.add("storage")
        return sorted(reasons)
