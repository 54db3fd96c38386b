"""The demo's settings and its worker process."""

from __future__ import annotations

import os
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contract import settings
from contract.settings import Settings
from headrace.stack.model import make_tiny_model
from headrace.stack.processes import Child

READY_WITHIN_S = 300.0
"""A large model takes minutes to load."""


def demo_settings(folder: Path, environ: Mapping[str, str]) -> Settings:
    """Settings of the demo.

    What file and environment say stands; the rest is chosen for a small machine: the tiny model, made
    in ``folder`` now; few partitions; topics under a prefix of the demo's own.
    """
    tree, origins = settings.read(None, environ)
    chosen: dict[str, Any] = {
        "topics.prefix": "headrace-demo",
        "topics.partitions": 4,
        "topics.reply_partitions": 4,
        "worker.http_port": _free_port(),
    }
    if settings.load(environ=environ).engine.kind == "vllm" and "engine.model_path" not in origins:
        model = str(make_tiny_model(folder.absolute() / "tiny-llama"))
        chosen |= {"engine.model_path": model, "engine.max_model_len": 2_048, "pools.default.tokenizer": model}
    for field, value in chosen.items():
        if not any(origin == field or origin.startswith(f"{field}.") for origin in origins):
            _set(tree, field, value)
    return settings.build(tree)


class Worker:
    """``headrace worker`` as a process, and what it tells over HTTP."""

    def __init__(self, current: Settings, folder: Path) -> None:
        # No settings file: the environment says it all.
        environment = {**settings.environment(current), "HEADRACE_CONFIG": os.devnull}
        self._url = f"http://127.0.0.1:{current.worker.http_port}"
        self._drain_s = current.worker.drain_timeout_s
        self.child = Child(
            "worker", [sys.executable, "-m", "headrace", "worker"], folder / "worker.log", env=environment
        )

    def wait_until_ready(self) -> None:
        """Raises ``StackError`` with the last log lines when it ends early or is not ready in time."""
        self.child.wait_until(lambda: self.page("/readyz") is not None, READY_WITHIN_S, "it is ready")

    def page(self, path: str) -> str | None:
        """A page of its health server; None when it does not answer, or not with 200."""
        try:
            with urllib.request.urlopen(self._url + path, timeout=5) as answer:
                text: str = answer.read().decode()
                return text
        except (urllib.error.URLError, OSError):
            return None

    def stop(self) -> None:
        """Drains it; harmless when it does not run."""
        self.child.stop(self._drain_s + 10.0)


def _set(tree: dict[str, Any], field: str, value: Any) -> None:
    *tables, leaf = field.split(".")
    for table in tables:
        tree = tree.setdefault(table, {})
    tree[leaf] = value


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
