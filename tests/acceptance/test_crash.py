"""kill -9 of the worker between each pair of steps: lost 0, doubled 0, charged twice 0."""

from __future__ import annotations

import functools
import signal

import pytest

from consumers.crash import Point
from headrace.stack.processes import wait_for
from tests.acceptance.harness import WorkerProcess, World

REQUESTS = 200


def _through(world: World, doomed: WorkerProcess, count: int) -> bool:
    """Small batches, so that each point is passed more than once before the worker dies."""
    return not doomed.child.running or world.settled() >= count


@pytest.mark.parametrize("point", list(Point))
def test_worker_killed_between_steps_loses_and_doubles_nothing(world: World, point: Point) -> None:
    doomed = world.worker(crash_at=f"{point}:2").ready()
    requests = world.requests(REQUESTS)
    for end in range(20, REQUESTS + 1, 20):
        world.publish(requests[end - 20 : end])
        if end < REQUESTS // 2:
            wait_for(functools.partial(_through, world, doomed, end), 30, "a batch is through")
    wait_for(lambda: not doomed.child.running, 30, f"the worker dies at {point}")
    assert doomed.child.exit_status == -signal.SIGKILL
    world.worker().ready()
    world.wait_settled(REQUESTS)
    world.wait_results(REQUESTS)
    wait_for(lambda: world.lag() == 0, 30, "all committed")
    world.assert_sound(REQUESTS)
    for one in world.workers[1:]:
        assert one.terminate() == 0
    assert world.reconcile() == []


@pytest.mark.parametrize("point", [Point.AFTER_COMMIT, Point.BEFORE_PUBLISH])
def test_dead_letter_survives_a_worker_killed_after_the_commit(world: World, point: Point) -> None:
    doomed = world.worker(crash_at=str(point)).ready()
    world.publish(world.requests(1, prompt="FAULT:transient x"), partition=0)
    wait_for(lambda: not doomed.child.running, 30, "the worker dies")
    assert world.query("SELECT outcome FROM settled") == [("failed",)]
    world.worker().ready()
    wait_for(lambda: world.lag() == 0, 60, "all committed")
    assert len(world.read(world.settings.names.dead)) == 1
