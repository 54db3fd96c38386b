"""Start, drain, stop, engine death, rebalance: with real signals on real processes."""

from __future__ import annotations

import signal

from headrace.stack.processes import wait_for
from tests.acceptance.harness import World


def test_sigterm_drains_what_runs_gives_back_what_waits_and_ends_with_zero(world: World) -> None:
    first = world.worker().ready()
    requests = world.requests(200)
    for request in requests[:30]:
        request["prompt"] = "FAULT:slow=1500 x"
    world.publish(requests[:30])
    wait_for(lambda: "headrace_engine_requests" in first.get("/metrics")[1], 10, "metrics")
    world.publish(requests[30:])
    assert first.terminate() == 0
    before = world.settled()
    world.worker().ready()
    world.wait_settled(200)
    assert before <= 200
    wait_for(lambda: world.lag() == 0, 30, "all committed")
    world.assert_sound(200)


def test_readiness_follows_the_drain_and_second_signal_aborts(world: World) -> None:
    worker = world.worker().ready()
    world.publish([world.requests(1)[0] | {"prompt": "FAULT:slow=60000 x", "deadline_ms": 600000}])
    wait_for(lambda: 'headrace_engine_requests{class="online"} 1.0' in worker.get("/metrics")[1], 20, "it runs")
    worker.child.send(signal.SIGTERM)
    wait_for(lambda: worker.get("/readyz") == (503, '{"ok":false,"reasons":["draining"]}'), 10, "not ready")
    worker.child.send(signal.SIGTERM)  # at once: the same wish, as from a supervisor that signals the group too

    def aborted() -> bool:
        worker.child.send(signal.SIGTERM)
        return not worker.child.running

    wait_for(aborted, 5, "a later one aborts")
    assert worker.child.wait(5) == 1
    assert world.settled() == 0


def test_drain_deadline_cuts_off_what_does_not_end_and_books_its_time(world: World) -> None:
    worker = world.worker(drain_timeout_s=4.0).ready()
    world.publish([world.requests(1)[0] | {"prompt": "FAULT:slow=60000 x", "deadline_ms": 600000}])
    wait_for(lambda: 'headrace_engine_requests{class="online"} 1.0' in worker.get("/metrics")[1], 20, "it runs")
    assert worker.terminate(timeout_s=15) == 0
    assert world.settled() == 0
    assert world.value("SELECT count(*) FROM attempts WHERE waste = 'aborted' AND allocated_ns > 0") == 1
    assert world.reconcile() == []


def test_engine_death_holds_the_intake_restarts_and_answers_what_was_taken(world: World) -> None:
    worker = world.worker().ready()
    requests = world.requests(300)
    requests[150]["prompt"] = "FAULT:die x"
    world.publish(requests)
    world.wait_settled(300)
    assert world.query("SELECT id, status, error_code FROM results WHERE status <> 'ok'") == [
        ("r-150", "failed", "engine_death")
    ]
    metrics = worker.get("/metrics")[1]
    assert "headrace_engine_deaths_total 3.0" in metrics
    assert worker.get("/readyz")[0] == 200
    world.wait_results(300)
    world.assert_sound(300)
    assert worker.terminate() == 0
    assert world.reconcile() == []


def test_second_worker_joins_and_leaves_under_load_without_loss(world: World) -> None:
    first = world.worker().ready()
    world.publish([r | {"prompt": "FAULT:slow=20 x"} for r in world.requests(1_500)])
    second = world.worker().ready()
    world.publish(world.requests(1_000, prefix="s"))
    wait_for(lambda: world.value("SELECT count(DISTINCT worker_epoch) FROM results") == 2, 30, "both work")
    assert second.terminate() == 0
    world.wait_settled(2_500)
    world.wait_results(2_500)
    wait_for(lambda: world.lag() == 0, 30, "all committed")
    world.assert_sound(2_500)
    assert world.value("SELECT count(*) FROM attempts WHERE waste = 'duplicate'") <= 125
    assert first.terminate() == 0
    assert world.reconcile() == []


def test_bad_setting_is_one_clear_line(world: World) -> None:
    worker = world.worker(max_attempts=2)
    worker.child.stop()
    worker.child._env["HEADRACE_WORKER__MAX_ATTEMPTS"] = "none"
    worker.child.log.unlink()
    worker.child.start()
    assert worker.child.wait(20) == 2
    lines = worker.child.tail().splitlines()
    assert len(lines) == 1
    assert "worker.max_attempts" in lines[0]
    assert "none" in lines[0]
