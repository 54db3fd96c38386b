"""The wall clock of the workers is stepped under load. Durations go by the monotonic one and must not move."""

from __future__ import annotations

import os
import random
import struct
import time
from pathlib import Path

from headrace.stack.processes import wait_for
from tests.faults.row import Row, account
from tests.faults.site import Load, Site

STEP_S = 3_600.0
_FOLDER = Path(__file__).with_name("clock")
_REQUESTS = 100


def stepped(site: Site, rng: random.Random, rounds: int) -> Row:
    """Wall clock stepped by +1 h, back, by -1 h and back; deadlines of 2 h hold. A round is the four steps."""
    offset = site.folder / "clock-offset"
    offset.write_bytes(struct.pack("d", 0.0))
    environment = {"HEADRACE_STEPPED_CLOCK": str(offset), "PYTHONPATH": os.fspath(_FOLDER)}
    with site.world() as world, offset.open("r+b", buffering=0) as file:
        for one in (world.worker(env=environment), world.worker(env=environment)):
            one.ready()
        recoveries, ids = [], list[str]()
        for _ in range(rounds):
            for step_s in (STEP_S, 0.0, -STEP_S, 0.0):
                with Load(world, rng, deadline_ms=int(2 * STEP_S * 1000)) as load:
                    wait_for(lambda load=load: load.sent >= _REQUESTS, 60, "load")  # type: ignore[misc]
                    file.seek(0)
                    file.write(struct.pack("d", step_s))
                    started, waiting = time.monotonic(), len(ids) + load.sent
                    world.wait_settled(waiting, timeout_s=120)
                    recoveries.append(time.monotonic() - started)
                ids += load.ids
        world.wait_settled(len(ids), timeout_s=120)
        assert world.query("SELECT id, status FROM results WHERE status <> 'ok'") == []
        far = "SELECT count(*) FROM worker_time WHERE abs(at_ms / 1000.0 - extract(epoch FROM now())) > 3000"
        assert world.value(far) > 0, "the workers' clock never moved"
        absurd = "starting_ns + idle_ns + busy_ns + draining_ns + stalled_ns > 60e9"
        assert world.query(f"SELECT * FROM worker_time WHERE {absurd}") == []
        return account("clocks.stepped", world, ids, recoveries, rounds=rounds)
