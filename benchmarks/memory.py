"""Memory of a worker with a little and with a lot waiting in the topic behind it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

from benchmarks import load
from benchmarks.figure import Goal
from benchmarks.site import Site
from headrace.stack.processes import wait_for

FEW, MANY = 10_000, 1_000_000
MAX_TOKENS = 128
TIMED: Mapping[str, Mapping[str, Any]] = {
    "engine": {
        "simulated_prefill_tokens_per_s": 200_000.0,
        "simulated_step_ms": 8.0,
        "simulated_step_ms_per_request": 0.05,
    }
}
"""The simulated engine's own speed: about 60 of these requests a second, so that what waits goes on waiting."""
_WARM_S = 10.0
_WATCH_S = 20.0
_EVERY_S = 0.2
_STARTED_S = 60.0

BACKLOG = (
    Goal("memory.backlog", "median memory of a worker, 1,000,000 waiting ÷ 10,000 waiting", "×", "0.95–1.05"),
    Goal("memory.backlog_max", "the same of the highest values", "×"),
    Goal("memory.backlog_mib", "median memory with 1,000,000 waiting", "MiB"),
)


def backlog(site: Site) -> dict[str, float]:
    """Memory of one worker while 10,000 and while 1,000,000 requests wait, 20 s after 10 s of work."""
    counts = [site.scaled(FEW), site.scaled(MANY)]
    order = counts[:: -1 if site.run % 2 else 1]
    seen = {count: _resident_mib(site, count) for count in order}
    few, many = (seen[count] for count in counts)
    return {
        "memory.backlog": statistics.median(many) / statistics.median(few),
        "memory.backlog_max": max(many) / max(few),
        "memory.backlog_mib": statistics.median(many),
    }


def _resident_mib(site: Site, count: int) -> list[float]:
    """Resident memory of a worker at work on a topic of ``count``, sampled over the watch."""
    with site.world(**TIMED) as world:
        load.publish(world, count, max_tokens=MAX_TOKENS)
        worker = world.worker()
        wait_for(lambda: world.settled() > 0, _STARTED_S, "the first is settled")
        time.sleep(_WARM_S)
        before, samples = world.settled(), []
        ends_s = time.monotonic() + _WATCH_S
        while time.monotonic() < ends_s:
            samples.append(worker.rss_bytes() / 2**20)
            time.sleep(_EVERY_S)
        worked, left = world.settled() - before, world.lag("offline")
        if not worked or left < count / 2:
            raise RuntimeError(f"no steady state: {worked} settled in {_WATCH_S:g} s, {left} of {count} left")
        return samples
