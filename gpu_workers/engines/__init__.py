"""The engines, and the one function that knows them all."""

from __future__ import annotations

from contract.settings import Settings
from gpu_workers.engine import Engine


def create(settings: Settings) -> Engine:
    """The engine that ``engine.kind`` names, not started. Imports only that one's packages."""
    if settings.engine.kind == "simulated":
        from gpu_workers.engines.simulated import SimulatedEngine

        return SimulatedEngine(settings)
    from gpu_workers.engines.vllm import VllmEngine

    return VllmEngine(settings)
