"""Law 6 over real processes: after retries, aborts, a crash and a drain, everything adds up, and tampering shows."""

from __future__ import annotations

import psycopg

from headrace.stack.processes import wait_for
from storage.reconcile import Finding, reconcile
from storage.store import Store
from tests.acceptance.harness import World

REQUESTS = 10_000
TAMPERINGS = {
    "a worker's last second is hidden": (
        "DELETE FROM worker_time WHERE (worker_epoch, seq) = (SELECT worker_epoch, max(seq) FROM worker_time "
        "GROUP BY worker_epoch ORDER BY 1 LIMIT 1)"
    ),
    "a share of GPU time is raised": (
        "UPDATE attempts SET allocated_ns = allocated_ns + 1 WHERE (worker_epoch, seq) = "
        "(SELECT worker_epoch, max(seq) FROM attempts GROUP BY worker_epoch ORDER BY 1 LIMIT 1)"
    ),
    "a charge is raised": (
        "UPDATE attempts SET charge_usd = charge_usd + 0.000000001 WHERE (worker_epoch, seq) = "
        "(SELECT worker_epoch, seq FROM attempts WHERE charge_usd > 0 LIMIT 1)"
    ),
    "a result vanishes": "DELETE FROM results WHERE key = (SELECT key FROM results LIMIT 1)",
    "waste is hidden as an answer": (
        "UPDATE attempts SET waste = NULL WHERE (worker_epoch, seq) = "
        "(SELECT worker_epoch, seq FROM attempts WHERE waste = 'retry' LIMIT 1)"
    ),
}


def test_ten_thousand_requests_with_retries_aborts_and_a_crash_reconcile_to_zero(world: World) -> None:
    requests = world.requests(REQUESTS)
    for number, request in enumerate(requests):
        request["business_line"] = ("search", "ads", "chat")[number % 3]
        if number % 100 == 0:
            request["prompt"] = f"FAULT:transient-once {number}"
        elif number % 1_000 == 7:
            # Runs past its deadline: cut off in the engine, or found late before it gets there.
            request |= {"prompt": f"FAULT:slow=20000 {number}", "deadline_ms": 3_000}
    world.publish(requests[:6_000])
    doomed = world.worker(crash_at="after_engine:40")
    wait_for(lambda: not doomed.child.running, 60, "the first worker dies")
    second = world.worker(drain_timeout_s=5.0).ready()
    world.publish(requests[6_000:])
    world.publish([world.requests(1, prefix="cut")[0] | {"prompt": "FAULT:slow=600000 x", "deadline_ms": 600_000}])
    world.wait_settled(REQUESTS, timeout_s=120)
    assert second.terminate() == 0

    assert world.settled() == REQUESTS
    assert world.reconcile() == []
    wastes = dict(world.query("SELECT waste, count(*) FROM attempts WHERE waste IS NOT NULL GROUP BY 1"))
    assert wastes["retry"] >= 50
    assert wastes["aborted"] >= 1
    assert world.value("SELECT count(*) FROM workers WHERE closed_at IS NULL") == 0

    before: list[Finding] = []
    url, store = world.settings.postgres.url, Store(world.settings.postgres)
    for name, statement in TAMPERINGS.items():
        with psycopg.connect(url) as connection:
            changed = connection.execute(statement.encode()).rowcount
            assert changed == 1, name
            connection.commit()
        found = list(reconcile(store))
        assert found != before, name  # each tampering adds findings of its own
        before = found
    store.close()


def test_backlog_of_two_hundred_thousand_requests_does_not_grow_the_worker(world: World) -> None:
    count = 200_000
    filler = "x" * 200
    world.publish(request | {"prompt": f"{filler} {number}"} for number, request in enumerate(world.requests(count)))
    worker = world.worker().ready()
    early, late = 0, 0

    def done() -> bool:
        nonlocal early, late
        rss, settled = worker.rss_bytes(), world.settled()
        if settled < 20_000:
            early = max(early, rss)
        else:
            late = max(late, rss)
        return settled >= count

    wait_for(done, 180, "the backlog is settled")
    print(f"worker RSS: first 20,000 of the backlog {early / 2**20:.0f} MiB, the rest {late / 2**20:.0f} MiB")
    assert late <= early * 1.1
