"""A small world with everything in it, for tests of cost and ledger."""

from __future__ import annotations

import random
from typing import Any

from contract.money import Usage
from contract.settings import Cost
from contract.statuses import Status, Waste
from storage.store import Store
from tests.integration.storage.build import Worker, execute, now_ms

COST = Cost(
    gpu_kind="cpu",
    gpu_usd_per_hour="2.37",
    input_usd_per_million="0.15",
    cached_input_usd_per_million="0.015",
    output_usd_per_million="0.60",
)
LINES = ("search", "ads", "")


class World:
    """A small world with everything in it: answers, retries, duplicates, resubmissions, a crash, idle time."""

    def __init__(self, store: Store, requests: int = 60, seed: int = 1) -> None:
        self.store = store
        self.random = random.Random(seed)
        store.seed_prices(COST)
        store.make_partitions()
        self.tariff = store.tariff("tiny", now_ms())
        self.workers = [Worker(store, f"w{number}") for number in range(3)]
        for number in range(requests):
            self.request(number)
        steady, slow, dead = self.workers
        steady.close(draining_ns=3)
        slow.beat(idle_ns=1_000_000_007)
        dead.beat(busy_ns=1_000, stalled_ns=77)  # in the engine when it died
        execute(store, "UPDATE workers SET provisioned_ns = provisioned_ns + 999 WHERE epoch = %s", dead.epoch)
        dead.fall_silent()
        assert store.reap(30) == [dead.epoch]

    def request(self, number: int) -> None:
        chance, worker = self.random, self.random.choice(self.workers)
        fields: dict[str, Any] = {
            "business_line": LINES[number % 3],
            "type": chance.choice(("chat", "summary")),
            "source": chance.choice(("web", "batch")),
        }
        usage = Usage.counted(chance.randint(1, 900), chance.randint(0, 900), chance.randint(1, 50))
        attempts = [
            worker.attempt(allocated_ns=chance.randint(1, 10**9), waste=waste)
            for waste in chance.sample([Waste.RETRY, Waste.ENGINE_DEATH, Waste.ABORTED], chance.randint(0, 2))
        ]
        status = chance.choice((*[Status.OK] * 6, Status.DEGRADED, Status.FAILED, Status.SHED, Status.CACHED))
        if status in (Status.OK, Status.DEGRADED):
            allocated_ns = chance.randint(1, 10**9)
            attempts.append(worker.attempt(allocated_ns=allocated_ns, usage=usage, tariff=self.tariff))
        settlement = worker.outcome(f"r{number}", status, usage=usage, attempts=attempts, **fields)
        self.store.settle([settlement])
        tell(worker, sum(attempt.allocated_ns for attempt in attempts))
        if status is Status.SHED or number % 7 == 0:
            self.again(worker, number, fields)

    def again(self, worker: Worker, number: int, fields: dict[str, Any]) -> None:
        """The same id on a new record: a duplicate or a resubmission."""
        late = worker.outcome(f"r{number}", tariff=self.tariff, **fields)
        self.store.settle([late])
        tell(worker, late.attempts[0].allocated_ns)


def tell(worker: Worker, allocated_ns: int) -> None:
    worker.beat(busy_ns=allocated_ns + 3, rounding_ns=3, idle_ns=11, starting_ns=5)
