"""No engine process outlives its worker, whatever kills the worker.

What a worker starts inherits a marker in its environment, ``HEADRACE_WORKER=<name>:<pid>-<start>``. A
tiny guardian process, in a session of its own and deaf to Ctrl-C and SIGTERM, holds the read end of a
pipe whose write end only the worker holds. When the worker ends, however it ends, the kernel closes
the pipe and the guardian kills whatever carries the marker. Should the guardian be killed too, the next
worker of the same name ends what its predecessor left.

Linux only, for it reads ``/proc``; elsewhere there is a warning and no guard.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from contract import logs
from gpu_workers import _guardian

MARKER = "HEADRACE_WORKER"
_RELEASE_S = 5.0


class Guard:
    """The watch over what one worker starts from now on."""

    def __init__(self, marker: str, guardian: subprocess.Popen[bytes] | None) -> None:
        self.marker = marker
        """What children carry: ``HEADRACE_WORKER=<name>:<pid>-<start>``."""
        self._guardian = guardian
        os.register_at_fork(after_in_child=self._let_go)

    def _let_go(self) -> None:
        # A fork without exec holds the pipe too; the guardian would wait for its end as well.
        if self._guardian is not None and self._guardian.stdin is not None:
            os.close(self._guardian.stdin.fileno())
            self._guardian = None

    def release(self) -> None:
        """The worker ends as it should: what it started and still runs is killed, the guardian ends. Harmless twice."""
        guardian, self._guardian = self._guardian, None
        if guardian is None:
            return
        os.environ.pop(MARKER, None)
        assert guardian.stdin is not None
        guardian.stdin.close()
        try:
            guardian.wait(_RELEASE_S)
        except subprocess.TimeoutExpired:
            logs.get("gpu_workers").warning("guard.slow", guardian_pid=guardian.pid)


def protect(name: str) -> Guard:
    """Ends what a dead predecessor called ``name`` left, then watches over what this process starts.

    Call it before the first child that shall be covered is started.
    """
    log = logs.get("gpu_workers")
    if not sys.platform.startswith("linux"):
        log.warning("guard.absent", reason="engine processes are guarded on Linux only")
        return Guard("", None)
    leftovers = _end_leftovers(name)
    if leftovers:
        log.warning("guard.leftovers_killed", pids=leftovers)
    value = f"{name}:{os.getpid()}-{_started(os.getpid())}"
    os.environ[MARKER] = value
    # vLLM names its processes through setproctitle, which writes over the environment that others can
    # read, and so over the marker, unless told not to.
    os.environ["SPT_NOENV"] = "1"
    guardian = subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(_guardian.__file__).absolute()), f"{MARKER}={value}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # a reader of our stderr must not wait for the guardian
        cwd="/",
        env={},
        start_new_session=True,
    )
    return Guard(f"{MARKER}={value}", guardian)


def _end_leftovers(name: str) -> list[int]:
    """Kills processes marked by a worker called ``name`` that is dead; their ids."""
    killed = []
    prefix = f"{MARKER}={name}:".encode()
    for pid, entry in _guardian.carriers(prefix).items():
        worker, _, start = entry[len(prefix) :].decode(errors="replace").partition("-")
        if worker.isdigit() and _started(int(worker)) != start:
            killed.append(pid)
            _guardian.kill_all(entry)
    return killed


def _started(pid: int) -> str:
    """When a process started, in ticks since boot; "" when it is gone. With the id it names a process for good."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The second field, the command, may hold spaces and brackets; field 22 is the start.
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]
