"""All faults, with how many rounds each gets in ``make faults`` and in ``make test``."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from tests.faults import clocks, endpoints, engines, membership, outages, records, workers
from tests.faults.row import Row
from tests.faults.site import SESSION_S, Site

HANG_S = 40.0
"""From a core that hangs to the last answer of what it held: docs/operations.md."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """``run`` breaks things ``rounds`` times, chosen by ``rng`` alone, and gives the account.

    0 ``rounds``: only in ``make test``; 0 ``test_rounds``: only in ``make faults``.
    """

    run: Callable[[Site, random.Random, int], Row]
    rounds: int
    test_rounds: int = 1
    bound_s: float | None = None
    """Promised longest recovery."""

    @property
    def name(self) -> str:
        return f"{self.run.__module__.rsplit('.', 1)[1]}.{self.run.__name__}"

    @property
    def what(self) -> str:
        """The fault in a line, from its docstring."""
        return (self.run.__doc__ or "").splitlines()[0]


FAULTS = (
    Fault(workers.killed, 20, bound_s=SESSION_S + 2),
    Fault(workers.zombie, 5),
    Fault(engines.simulated_died, 20, test_rounds=3),
    Fault(engines.simulated_hung, 7),
    Fault(engines.vllm_killed, 20, test_rounds=0),  # tests/acceptance/test_vllm.py breaks its core in each way
    Fault(engines.vllm_frozen, 20, test_rounds=0, bound_s=HANG_S),
    Fault(engines.vllm_terminated, 20, test_rounds=0),
    Fault(engines.vllm_worker_killed, 5, test_rounds=0),
    Fault(endpoints.killed, 20, test_rounds=0),
    Fault(endpoints.frozen, 20, test_rounds=0),
    Fault(endpoints.terminated, 20, test_rounds=0),
    Fault(endpoints.each_way, 0, test_rounds=3),
    Fault(endpoints.vllm_server, 6, test_rounds=0),  # tests/integration/test_http_server.py starts one
    Fault(membership.classic, 36, test_rounds=3, bound_s=membership.QUIET_S),
    Fault(membership.consumer, 36, test_rounds=0, bound_s=membership.QUIET_S),
    Fault(workers.same_id, 1_000, test_rounds=100),
    Fault(outages.broker_stopped, 3),
    Fault(outages.broker_killed, 20, test_rounds=0),
    Fault(outages.results_refused, 3),
    Fault(outages.result_over_limit, 3),
    Fault(outages.postgres_stopped, 3, test_rounds=0),
    Fault(outages.postgres_killed, 20, test_rounds=0),
    Fault(outages.postgres_frozen, 3, test_rounds=0),
    Fault(outages.postgres_sessions_killed, 3, test_rounds=0),
    Fault(outages.postgres_each_way, 0, test_rounds=4),
    Fault(engines.poison, 2, test_rounds=0),  # tests/acceptance/test_poison.py is its test
    Fault(endpoints.poison, 2, test_rounds=0),  # tests/acceptance/test_http_engine.py is its test
    Fault(records.odd, 5),
    Fault(records.dead_refused, 3),
    Fault(clocks.stepped, 3),
)
