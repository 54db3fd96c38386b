"""The guard with real processes: nothing a worker started outlives it, whatever ends the worker."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_workers import _guardian, guard
from gpu_workers.engines import vllm_profile

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the guard needs /proc")

_WORKER = """
import os, subprocess, sys, time
from gpu_workers import guard
watch = guard.protect(sys.argv[1])
nap = "import time; time.sleep(600)"
rename = "import setproctitle; setproctitle.setproctitle('VLLM::EngineCore'); "
children = [subprocess.Popen([sys.executable, "-c", code]) for code in (nap, rename + nap)]
forked = os.fork()
if forked == 0:
    time.sleep(600)
print(*(child.pid for child in children), watch._guardian.pid, forked, flush=True)
if sys.stdin.readline() == "release\\n":
    watch.release()
    os.kill(forked, 9)
    os.waitpid(forked, 0)
"""


class Worker:
    """A process that protects itself and starts two children; one renames itself as vLLM's core does."""

    def __init__(self, name: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _WORKER, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            start_new_session=True,
        )
        assert self.process.stdout is not None
        *children, self.guardian, self.forked = map(int, self.process.stdout.readline().split())
        self.children: list[int] = children
        deadline = time.monotonic() + 10
        while not Path(f"/proc/{children[1]}/cmdline").read_bytes().startswith(b"VLLM"):
            assert time.monotonic() < deadline, "the child did not rename itself"
            time.sleep(0.01)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        for pid in (*self.children, self.guardian, self.forked):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def worker() -> Iterator[Worker]:
    one = Worker(f"guard-test-{os.getpid()}")
    yield one
    one.close()


def _alive(pid: int) -> bool:
    return guard._started(pid) != ""


def _gone(*pids: int, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while any(map(_alive, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_children_end_within_two_seconds_of_a_kill_9_and_so_does_the_guardian(worker: Worker) -> None:
    assert all(map(_alive, worker.children))
    worker.kill()
    assert _gone(*worker.children, worker.guardian, within_s=2.0)


def test_guardian_survives_the_signals_that_end_a_worker(worker: Worker) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(worker.guardian, number)
    os.killpg(worker.process.pid, signal.SIGKILL)  # as a terminal or a service manager may
    worker.process.wait()
    assert _gone(*worker.children, worker.guardian, within_s=2.0)


def test_clean_release_leaves_no_guardian_and_no_child(worker: Worker) -> None:
    assert worker.process.stdin is not None
    worker.process.stdin.write("release\n")
    worker.process.stdin.flush()
    assert worker.process.wait(timeout=10) == 0
    assert not any(map(_alive, (*worker.children, worker.guardian)))


def test_leftovers_of_a_dead_predecessor_are_ended_when_its_guardian_died_too(worker: Worker) -> None:
    os.kill(worker.guardian, signal.SIGKILL)
    worker.kill()
    assert all(map(_alive, worker.children))
    guard.protect(f"guard-test-{os.getpid()}").release()
    assert not any(map(_alive, worker.children))


def test_living_worker_of_the_same_name_is_left_alone(worker: Worker) -> None:
    guard.protect(f"guard-test-{os.getpid()}").release()
    assert all(map(_alive, worker.children))


def test_release_takes_the_marker_back_and_may_be_repeated() -> None:
    watch = guard.protect("guard-test-marker")
    assert f"{guard.MARKER}={os.environ[guard.MARKER]}" == watch.marker
    watch.release()
    watch.release()
    assert guard.MARKER not in os.environ
    assert watch.marker.encode() not in _guardian.carriers(guard.MARKER.encode()).values()


def test_child_started_deaf_to_interrupt_survives_one_and_we_do_not_stay_deaf() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set())
    code = "import time; print('up', flush=True); time.sleep(0.2); print('alive', flush=True)"
    with vllm_profile.deaf_to_interrupt():
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        child.send_signal(signal.SIGINT)
        assert child.stdout.read() == "alive\n"
    assert child.returncode == 0
    assert signal.pthread_sigmask(signal.SIG_BLOCK, set()) == before
