"""Requests that kill: found within three deliveries, counted over workers and restarts, neighbours unharmed."""

from __future__ import annotations

import threading
import time

import pytest

from consumers import dead_letters
from headrace.stack.processes import wait_for
from tests.acceptance.harness import World

REQUESTS = 300


class Supervisor:
    """Starts a worker anew whenever it ends, as an orchestrator does; counts how often."""

    def __init__(self, world: World, workers: int) -> None:
        self._world = world
        self._slots = [world.worker(dead_after_s=7.0) for _ in range(workers)]
        self._stopping = threading.Event()
        self.deaths = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.wait(0.05):
            for slot, one in enumerate(self._slots):
                if not one.child.running:
                    self.deaths += 1
                    self._slots[slot] = self._world.worker(dead_after_s=7.0)

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
        for one in self._slots:
            assert one.ready().terminate() == 0  # one that has just begun has no handler for the signal yet


@pytest.mark.parametrize("killers", [1, 2])
def test_request_that_kills_the_engine_is_found_and_its_neighbours_are_answered(world: World, killers: int) -> None:
    workers = [world.worker() for _ in range(3)]
    for one in workers:
        one.ready()
    requests = world.requests(REQUESTS)
    for number in range(killers):
        requests[100 + 7 * number]["prompt"] = "FAULT:die x"
    world.publish(requests)
    world.wait_settled(REQUESTS)
    failed = {f"r-{100 + 7 * number}" for number in range(killers)}
    assert {row[0] for row in world.query("SELECT id FROM results WHERE status <> 'ok'")} == failed
    deaths = world.value("SELECT count(*) FROM attempts WHERE waste = 'engine_death' AND key IN "
                         "(SELECT key FROM results WHERE status = 'failed')")  # fmt: skip
    assert deaths == 3 * killers
    letters = wait_for(
        lambda: found if len(found := world.read(world.settings.names.dead)) == killers else None, 30, "dead letters"
    )
    assert {dict(letter.headers())[dead_letters.REASON] for letter in letters} == {b"engine_death"}
    wait_for(lambda: world.value("SELECT count(*) FROM suspects") == 0, 10, "nobody is suspected any more")
    world.wait_results(REQUESTS)
    world.assert_sound(REQUESTS)
    for one in workers:
        assert one.terminate() == 0
    assert world.reconcile() == []


@pytest.mark.timeout(400)
def test_request_that_kills_whole_workers_is_found_within_three_deliveries(world: World) -> None:
    supervisor = Supervisor(world, workers=3)
    requests = world.requests(REQUESTS, deadline_ms=600_000)
    requests[100]["prompt"] = "FAULT:crash x"
    started = time.monotonic()
    world.publish(requests)
    try:
        world.wait_settled(REQUESTS, timeout_s=180)
    finally:
        supervisor.stop()
    print(f"one killer among {REQUESTS}: {supervisor.deaths} workers died, {time.monotonic() - started:.0f} s")
    assert supervisor.deaths == 3
    assert world.query("SELECT id, error_code FROM results WHERE status <> 'ok'") == [("r-100", "engine_death")]
    assert len(wait_for(lambda: world.read(world.settings.names.dead), 30, "a dead letter")) == 1
    world.wait_results(REQUESTS)
    world.assert_sound(REQUESTS)
    assert world.reconcile() == []
