"""How vLLM is set up in this process: environment, engine arguments, and how its core is started.

On the CPU build the profile is one thread, float32, one process for the core; every value can be
overridden, the environment by the environment, the arguments by ``engine.vllm`` in the settings.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from contract.errors import FatalError
from contract.settings import Engine

_PREFILL_TOKENS_PER_STEP = 2_048
_LEAST_KV_BYTES = 64 << 20

_ENVIRONMENT = {
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
_CPU_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # with the uni executor: no third process, no polling core
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every worker of a machine sits on its first core
    # enforce_eager leaves one compilation, of C++ at the first request with logprobs: 3 to 25 s of silence
    "TORCH_COMPILE_DISABLE": "1",
}


def on_cpu() -> bool:
    """Whether the installed vLLM is its CPU build; judged as vLLM does, without importing it."""
    for name in ("vllm-cpu", "vllm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            if name == "vllm-cpu" or "cpu" in importlib.metadata.version(name):
                return True
    return False


def environment() -> dict[str, str]:
    """What any process of vLLM's reads at import and its children inherit. What is set already stays."""
    wanted = _ENVIRONMENT | (_CPU_ENVIRONMENT if on_cpu() else {})
    return {name: os.environ.get(name, value) for name, value in wanted.items()}


def set_environment() -> None:
    """Sets ``environment`` for this process and those it starts."""
    os.environ.update(environment())
    # Never fork this process: it has Kafka's and Postgres' threads, and a fork would hold our pipes open.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


def engine_arguments(engine: Engine) -> dict[str, Any]:
    """Arguments for ``AsyncEngineArgs``. Raises ``FatalError`` when the settings name no model."""
    if not engine.model_path:
        raise FatalError("engine.model_path is empty: name a model's folder, or a model of the Hugging Face hub")
    arguments: dict[str, Any] = {
        "model": engine.model_path,
        "max_model_len": engine.max_model_len,
        "max_num_seqs": engine.max_requests,
        "scheduling_policy": "priority",
        "disable_log_stats": True,  # our own stat logger is enough; nothing enters a Prometheus registry
        "use_tqdm_on_load": False,
        "structured_outputs_config": {"backend": "guidance"},  # docs/decisions/one-grammar-compiler.md
    }
    if on_cpu():
        arguments |= {
            "dtype": "float32",
            "enforce_eager": True,
            "distributed_executor_backend": "uni",
            # A seeded request whose prompt is computed in pieces kills the core on the CPU ("CPU Generator
            # does not use offset"), so each prompt is computed whole.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(_PREFILL_TOKENS_PER_STEP, engine.max_model_len, engine.max_requests),
        }
        if kv_bytes := _kv_bytes(engine.model_path):
            arguments["kv_cache_memory_bytes"] = kv_bytes
    return arguments | engine.vllm


def _kv_bytes(model_path: str) -> int | None:
    """As much KV cache as weights, at least 64 MiB. None (vLLM's own choice): the model is not a folder."""
    if not Path(model_path).is_dir():
        return None
    return max(_LEAST_KV_BYTES, sum(file.stat().st_size for file in Path(model_path).glob("*.safetensors")))


@contextlib.contextmanager
def deaf_to_interrupt() -> Iterator[None]:
    """Processes started here never see a Ctrl-C: the terminal sends it to all, but the worker wants to drain.

    The mask is this thread's and is inherited by what it starts.
    """
    multiprocessing.resource_tracker.ensure_running()  # starting it would lift the mask again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_fork_server() -> None:
    """On the CPU: starts the process that cores are forked from, which imports vLLM while we do.

    It is a clean process without threads, stays as long as we do, and makes a restart cost 4 s, not 20.
    """
    if on_cpu():
        multiprocessing.set_forkserver_preload(["vllm.v1.engine.core", "vllm.v1.engine.async_llm"])
        multiprocessing.forkserver.ensure_running()


@contextlib.contextmanager
def cores_from_fork_server() -> Iterator[None]:
    """On the CPU: vLLM forks its core from the fork server. vLLM's own switch knows only "spawn" and "fork"."""
    from vllm.v1.engine import utils

    if not on_cpu() or not hasattr(utils, "get_mp_context"):
        yield
        return
    original = utils.get_mp_context
    utils.get_mp_context = lambda: multiprocessing.get_context("forkserver")
    try:
        yield
    finally:
        utils.get_mp_context = original
