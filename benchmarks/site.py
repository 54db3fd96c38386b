"""Where benchmarks run: a broker and a database of their own, with worlds of fresh topics and tables on them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.acceptance.servers import AT_ONCE, Servers

ROOT = Path(__file__).parents[1]
PARTITIONS = 4
_VENV = ".venv-peers"


class Site(Servers):
    """Servers for one call of ``python -m benchmarks``.

    Args:
        scale: share of the requests that a quick try takes; 1: all.
    """

    def __init__(self, folder: Path, *, scale: float = 1.0) -> None:
        super().__init__(
            folder,
            {"topics": {"partitions": PARTITIONS}, "engine": AT_ONCE},
            {"track_commit_timestamp": "on"},  # says when a row was really there
        )
        self.scale = scale
        self.run = 0
        """Which run of its benchmark this is, from 0. Who goes first alternates with it."""

    def scaled(self, count: int) -> int:
        """``count``, or fewer in a quick try."""
        return max(1, round(count * self.scale))

    def calm(self) -> None:
        """Writes out what earlier work left in memory, so that nobody pays for another's pages."""
        self.execute("CHECKPOINT")
        os.sync()


def peers_python() -> Path:
    """The Python that has the peers' libraries; makes its environment the first time (``requirements/peers.txt``)."""
    made = subprocess.run(["make", "-s", f"{_VENV}/.ready"], cwd=ROOT, capture_output=True, text=True, check=False)
    if made.returncode:
        raise RuntimeError(f"the peers' environment cannot be made:\n{made.stdout}{made.stderr}")
    return ROOT / _VENV / "bin" / "python"
