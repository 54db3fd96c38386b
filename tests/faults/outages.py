"""Outages of the broker and of Postgres, and topics that take nothing, under a steady load."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import psycopg

from headrace.stack.processes import wait_for
from tests.acceptance.harness import WorkerProcess, World
from tests.faults.row import Row, account
from tests.faults.site import Load, Site, hold_for, metric, refuse_writes, requests, set_topic, take_writes

_WARM_REQUESTS = 100
_KILL_EVERY_S = 2.0

Breaking = Callable[[Site, World, WorkerProcess], float]
"""Breaks something for a while and mends it; gives the monotonic second at which it was whole again."""


def _under_load(name: str, site: Site, rng: random.Random, rounds: int, *breakings: Breaking) -> Row:
    """A worker under load, broken ``rounds`` times by ``breakings`` in turn; it is ready again by itself each time."""
    with site.world() as world:
        worker = world.worker().ready()
        recoveries, ids = [], list[str]()
        for number in range(rounds):
            with Load(world, rng) as load:
                wait_for(lambda load=load: load.sent >= _WARM_REQUESTS, 30, "load")  # type: ignore[misc]
                whole_s = breakings[number % len(breakings)](site, world, worker)
                waiting = len(ids) + load.sent
                worker.ready(timeout_s=120)
                world.wait_settled(waiting, timeout_s=120)
                recoveries.append(time.monotonic() - whole_s)
            ids += load.ids
            world.wait_settled(len(ids), timeout_s=120)
        assert world.query("SELECT id, status FROM results WHERE status <> 'ok'") == []
        return account(name, world, ids, recoveries)


# -- the broker -----------------------------------------------------------------------------------


def broker_stopped(site: Site, rng: random.Random, rounds: int) -> Row:
    """Stopped for 20 s, then started."""

    def breaking(site: Site, world: World, worker: WorkerProcess) -> float:
        site.kafka.stop()
        hold_for(site.outage_s)
        site.kafka.start()
        return time.monotonic()

    return _under_load("outages.broker_stopped", site, rng, rounds, breaking)


def broker_killed(site: Site, rng: random.Random, rounds: int) -> Row:
    """kill -9, started at once."""

    def breaking(site: Site, world: World, worker: WorkerProcess) -> float:
        site.kafka.kill()
        site.kafka.start()
        return time.monotonic()

    return _under_load("outages.broker_killed", site, rng, rounds, breaking)


def results_refused(site: Site, rng: random.Random, rounds: int) -> Row:
    """The results topic refuses writes: the intakes hold, readiness says why, all of it goes out once it is mended."""

    def breaking(site: Site, world: World, worker: WorkerProcess) -> float:
        topic = world.settings.names.results
        refuse_writes(world, topic)
        wait_for(lambda: '"publish"' in worker.get("/readyz")[1], 30, "not ready while results are refused")
        hold_for(site.outage_s)
        assert '"publish"' in worker.get("/readyz")[1], "ready although results are refused still"
        take_writes(world, topic)
        return time.monotonic()

    return _under_load("outages.results_refused", site, rng, rounds, breaking)


def result_over_limit(site: Site, rng: random.Random, rounds: int) -> Row:
    """The topic's own limit lies below an answer, against the settings: the answer is stored, a reference goes out."""
    with site.world() as world:
        worker = world.worker().ready()
        set_topic(world, world.settings.names.results, "max.message.bytes", "3000")
        recoveries, ids = [], list[str]()
        for number in range(rounds):
            batch = requests(rng, 200, slow_ms=50, prefix=f"l{number}")
            for big in rng.sample(batch, 10):
                big |= {"max_tokens": 700, "ignore_eos": True}
            started = time.monotonic()
            world.publish(batch)
            ids += [request["id"] for request in batch]
            world.wait_results(len(ids), timeout_s=120)
            recoveries.append(time.monotonic() - started)
        assert worker.get("/readyz")[0] == 200
        assert world.value("SELECT count(*) FROM results WHERE length(output::text) > 3000") == 10 * rounds
        assert sum(result.output_ref is not None for result in world.results()) == 10 * rounds  # no neighbour's
        return account("outages.result_over_limit", world, ids, recoveries)


# -- Postgres -------------------------------------------------------------------------------------


def _while_away(world: World, worker: WorkerProcess, outage_s: float) -> None:
    """During an outage: readiness is false within a few seconds, and pulling goes on up to the mark."""
    ends = time.monotonic() + outage_s
    taken = metric(worker, 'headrace_records_total{class="online"}')
    wait_for(lambda: '"storage"' in worker.get("/readyz")[1], 30, "not ready without Postgres")
    wait_for(lambda: metric(worker, 'headrace_records_total{class="online"}') > taken, 30, "work goes on without it")
    mark = world.settings.classes["online"].max_in_flight_requests
    while time.monotonic() < ends:
        in_flight = metric(worker, 'headrace_in_flight_requests{bucket="short",class="online"}')
        assert in_flight <= mark, f"{in_flight} in flight, above the mark of {mark}"
        hold_for(0.5)


def _nobody_idles_in_transaction(world: World) -> None:
    idle = (
        "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'"
        " AND now() - state_change > interval '1 s'"
    )
    wait_for(lambda: world.value(idle) == 0, 30, "no session is idle in a transaction")


def postgres_stopped(site: Site, rng: random.Random, rounds: int) -> Row:
    """Stopped for 20 s, then started."""
    return _under_load("outages.postgres_stopped", site, rng, rounds, _stop_postgres)


def postgres_killed(site: Site, rng: random.Random, rounds: int) -> Row:
    """kill -9 of the server and all its processes, started at once."""
    return _under_load("outages.postgres_killed", site, rng, rounds, _kill_postgres)


def postgres_frozen(site: Site, rng: random.Random, rounds: int) -> Row:
    """SIGSTOP of the server and its sessions for 20 s, then SIGCONT: sockets stay open and nobody answers."""
    return _under_load("outages.postgres_frozen", site, rng, rounds, _freeze_postgres)


def postgres_sessions_killed(site: Site, rng: random.Random, rounds: int) -> Row:
    """Every session of the workers is terminated every 2 s, for 20 s."""
    return _under_load("outages.postgres_sessions_killed", site, rng, rounds, _kill_sessions)


def postgres_each_way(site: Site, rng: random.Random, rounds: int) -> Row:
    """The four ways in turn, with one worker."""
    ways = (_stop_postgres, _kill_postgres, _freeze_postgres, _kill_sessions)
    return _under_load("outages.postgres_each_way", site, rng, rounds, *ways)


def _stop_postgres(site: Site, world: World, worker: WorkerProcess) -> float:
    site.postgres.stop()
    _while_away(world, worker, site.outage_s)
    site.postgres.start()
    return time.monotonic()


def _kill_postgres(site: Site, world: World, worker: WorkerProcess) -> float:
    site.postgres.kill()
    site.postgres.start()
    return _whole(world)


def _freeze_postgres(site: Site, world: World, worker: WorkerProcess) -> float:
    with _stopped(site.postgres.pid):
        _while_away(world, worker, site.outage_s)
    return _whole(world)


def _kill_sessions(site: Site, world: World, worker: WorkerProcess) -> float:
    statement = (
        b"SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
        b" WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    ends = time.monotonic() + site.outage_s
    pause = threading.Event()
    with psycopg.connect(world.settings.postgres.url, autocommit=True) as connection:
        while time.monotonic() < ends:
            connection.execute(statement)
            pause.wait(_KILL_EVERY_S)
    return _whole(world)


def _whole(world: World) -> float:
    whole_s = time.monotonic()
    _nobody_idles_in_transaction(world)
    return whole_s


@contextlib.contextmanager
def _stopped(pid: int) -> Iterator[None]:
    server = psutil.Process(pid)
    family = [server, *server.children(recursive=True)]
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
