"""The engines, and the one function that knows them all.

Reading order: ``rules`` (what is refused, and how) and ``choices`` (the shape of answers), shared by all;
``simulated`` with ``simulated_plan`` and ``simulated_gpu``, over ``clock``; ``vllm`` with ``vllm_profile``,
``vllm_params``, ``vllm_life`` and ``vllm_output``; ``http`` with ``http_params``, ``http_endpoint``, ``http_life``,
``http_output`` and ``http_server``.
"""

from __future__ import annotations

from contract.settings import Settings
from gpu_workers.engine import Engine


def create(settings: Settings) -> Engine:
    """The engine that ``engine.kind`` names, not started. Imports only that one's packages."""
    if settings.engine.kind == "simulated":
        from gpu_workers.engines.simulated import SimulatedEngine

        return SimulatedEngine(settings)
    if settings.engine.kind == "http":
        from gpu_workers.engines.http import HttpEngine

        return HttpEngine(settings)
    from gpu_workers.engines.vllm import VllmEngine

    return VllmEngine(settings)
