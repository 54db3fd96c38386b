"""The guard: waits until the pipe on stdin closes, then ends every process that carries the marker.

A script of its own, run without site packages, so that it starts in 20 ms and holds 10 MB.
"""

import os
import signal
import sys
import time

GRACE_S = 3.0
"""From TERM to KILL: a broker and a database write their last pages, a worker does not drain."""


def carriers(entry: bytes) -> set[int]:
    """Processes whose environment holds ``entry``. One that ends meanwhile, or is not ours to read, is passed over."""
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    if entry in file.read().split(b"\0"):
                        found.add(int(name))
            except OSError:
                continue
    return found


def signal_all(pids: set[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:
            continue


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    entry = b"HEADRACE_STACK_MARKER=" + sys.argv[1].encode()
    told: set[int] = set()
    deadline = time.monotonic() + GRACE_S
    while pids := carriers(entry):
        if time.monotonic() < deadline:
            signal_all(pids - told, signal.SIGTERM)
            told |= pids
        else:
            signal_all(pids, signal.SIGKILL)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
