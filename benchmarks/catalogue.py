"""All benchmarks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from benchmarks import affinity, batching, direct, engine, memory, pipeline, scheduling
from benchmarks.figure import Goal
from benchmarks.site import Site


@dataclasses.dataclass(frozen=True, slots=True)
class Benchmark:
    """``measure`` makes one run and gives a value for each of ``goals``, by name. It raises when the run is no good.

    ``name`` is the group, a dot and a word; its figures need not be called so.
    """

    name: str
    measure: Callable[[Site], Mapping[str, float]]
    goals: tuple[Goal, ...]

    @property
    def what(self) -> str:
        """The benchmark in a line, from its docstring."""
        return (self.measure.__doc__ or "").splitlines()[0]

    def is_meant_by(self, word: str) -> bool:
        """Whether ``word`` is the name of it or of a figure of its, or how one begins."""
        return any(name.startswith(word) for name in (self.name, *(goal.name for goal in self.goals)))


BENCHMARKS: tuple[Benchmark, ...] = (
    Benchmark("pipeline.vs_bare", pipeline.vs_bare, pipeline.VS_BARE),
    Benchmark("pipeline.vs_faststream", pipeline.vs_faststream, pipeline.VS_FASTSTREAM),
    Benchmark("pipeline.vs_quix", pipeline.vs_quix, pipeline.VS_QUIX),
    Benchmark("memory.backlog", memory.backlog, memory.BACKLOG),
    Benchmark("engine.vs_generate", engine.vs_generate, engine.VS_GENERATE),
    Benchmark("engine.vs_run_batch", engine.vs_run_batch, engine.VS_RUN_BATCH),
    Benchmark("engine.vs_service", engine.vs_service, engine.VS_SERVICE),
    Benchmark("batching.none_fixed_continuous", batching.none_fixed_continuous, batching.NONE_FIXED_CONTINUOUS),
    Benchmark("online.p99_beside_offline", scheduling.p99_beside_offline, scheduling.BESIDE_OFFLINE),
    Benchmark("online.p99_vs_direct", direct.p99_vs_direct, direct.P99_VS_DIRECT),
    Benchmark("buckets.short_p99_continuous", scheduling.short_p99_continuous, scheduling.CONTINUOUS),
    Benchmark("buckets.short_p99_closed", scheduling.short_p99_closed, scheduling.CLOSED),
    Benchmark("prefix.affinity", affinity.affinity, affinity.AFFINITY),
)
