"""Child processes that never outlive this one, each with a log file.

Children carry a marker in their environment. One guardian process (``gpu_workers._guardian``, which does
the same for a worker's engine) is started with the first child and holds the read end of a pipe whose
write end only we hold: when we end, however we end, the pipe closes and the guardian kills everything
that carries the marker, children of children included.
"""

from __future__ import annotations

import atexit
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from contract.errors import FatalError
from gpu_workers import _guardian

MARKER = "HEADRACE_STACK_MARKER"
POLL_S = 0.05
TAIL_LINES = 30
_RELEASE_S = 10.0

T = TypeVar("T")


class StackError(FatalError):
    """A part of the one-machine stack did not start, or ended early. Says what to do or shows its last log lines."""


class Child:
    """One child process in a session of its own, so that a Ctrl-C in the terminal reaches only its parent.

    Standard output and error go to ``log``. ``env`` is added to our environment; ``user`` is a system
    user to run as (we must be root then).
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str | os.PathLike[str]],
        log: Path,
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        user: str | None = None,
    ) -> None:
        self.name = name
        self.argv = [os.fspath(arg) for arg in argv]
        self.log = log
        self._env = dict(env or {})
        self._cwd = cwd
        self._user = user
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it; a running one is left alone. Raises ``StackError`` when the program cannot be started."""
        if self.running:
            return
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            try:
                self._process = subprocess.Popen(
                    self.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=os.environ | self._env | {MARKER: _guard.marker()},
                    cwd=self._cwd,
                    user=self._user,
                    group=self._user,
                    extra_groups=[] if self._user else None,
                    start_new_session=True,
                )
            except OSError as error:
                raise StackError(f"{self.name}: cannot start {self.argv[0]}: {error.strerror}") from error

    @property
    def pid(self) -> int:
        """Raises ``StackError`` when it was never started."""
        if self._process is None:
            raise StackError(f"{self.name} was not started")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def exit_status(self) -> int | None:
        """As ``subprocess`` gives it (negative: a signal); None while it runs or before it did."""
        return None if self._process is None else self._process.poll()

    def send(self, signal_number: int) -> None:
        """Sends a signal to the process alone; harmless when it has ended."""
        if self._process is not None:
            self._process.send_signal(signal_number)

    def wait(self, timeout_s: float) -> int:
        """Waits for its end; gives the exit status. Raises ``StackError`` at the deadline."""
        if self._process is None:
            raise StackError(f"{self.name} was not started")
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise StackError(f"{self.name} still runs after {timeout_s:g} s\n{self.tail()}") from None

    def stop(self, timeout_s: float = 10.0, signal_number: int = signal.SIGTERM) -> bool:
        """Asks it to end, kills its whole group at the deadline. Tells whether it ended by itself."""
        if self._process is None or self._process.poll() is not None:
            return True
        self.send(signal_number)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            return False
        return True

    def kill(self) -> None:
        """kill -9 of the process alone, as a crash is."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The last lines of its log."""
        try:
            return "\n".join(self.log.read_text("utf-8", "replace").splitlines()[-lines:])
        except FileNotFoundError:
            return ""

    def wait_until(self, condition: Callable[[], T | None], timeout_s: float, what: str) -> T:
        """Like ``wait_for``, but gives up at once, with the last log lines, when the process has ended."""

        def checked() -> T | None:
            if self.running:
                return condition()
            raise StackError(f"{self.name} ended with status {self.exit_status} before {what}\n{self.tail()}")

        try:
            return wait_for(checked, timeout_s, what)
        except TimeoutError as error:
            raise StackError(f"{self.name}: {error}\n{self.tail()}") from None


def wait_for(condition: Callable[[], T | None], timeout_s: float, what: str) -> T:
    """Asks ``condition`` until it gives something true, and returns that. Raises ``TimeoutError``."""
    deadline = time.monotonic() + timeout_s
    while True:
        if found := condition():
            return found
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(POLL_S)


def interrupt_on_signals() -> None:
    """SIGINT, SIGTERM and a closed terminal raise ``KeyboardInterrupt`` in the main thread.

    SIGINT too: a shell starts background jobs with it ignored.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, signal.default_int_handler)


class _Guard:
    """Starts the guardian once per process (a fork gets its own) and gives the marker to children."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = 0
        self._marker = ""
        self._process: subprocess.Popen[bytes] | None = None
        os.register_at_fork(after_in_child=self._let_go)

    def marker(self) -> str:
        with self._lock:
            if self._owner != os.getpid() or self._process is None or self._process.poll() is not None:
                # A guardian that was killed is replaced; the marker stays, so that older children stay covered.
                if self._owner != os.getpid():
                    self._marker = secrets.token_hex(16)
                    atexit.register(self._release)
                self._owner = os.getpid()
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", _guardian.__file__, f"{MARKER}={self._marker}"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    # Without a marker of its own: the guardian of *our* parent must not end it before its work is done.
                    env={},
                    start_new_session=True,
                    cwd="/",
                )
            return self._marker

    def _let_go(self) -> None:
        # A fork without exec holds the pipe too; the guardian would wait for its end as well.
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def _release(self) -> None:
        """At a normal end: the guardian does its work while we wait for it."""
        if self._owner == os.getpid() and self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait(_RELEASE_S)


_guard = _Guard()
