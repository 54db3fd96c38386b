"""vLLM's own server beside the workers: found again by the next worker, so that a redeploy keeps the weights.

One server per port and folder. Its processes carry ``HEADRACE_SERVE=<folder>/<port>`` in their environment and
not the worker's own marker, so the guard that ends what a dead worker left passes them by. ``<port>.json`` tells
process id and arguments, ``<port>.log`` what it says, and a lock on ``<port>.lock`` keeps two workers from
starting it twice. Ended by ``headrace engine stop``, or by a worker that saw it die or fall silent and
starts it anew. Linux only, for it reads ``/proc``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from contract import logs, settings
from contract.errors import FatalError
from contract.settings import Engine
from gpu_workers import _guardian
from gpu_workers.engines import vllm_profile

MARKER = "HEADRACE_SERVE"
_STACK_MARKER = "HEADRACE_STACK_MARKER"
_TAIL_LINES = 15
_POLL_S = 0.05
_LOCAL = ("127.0.0.1", "localhost", "::1", "0.0.0.0")

_children: list[subprocess.Popen[bytes]] = []
"""What this process started, kept so that an ended one is noticed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """A server as its folder knows it."""

    folder: Path
    port: int

    @property
    def marker(self) -> bytes:
        return f"{MARKER}={self.folder.resolve()}/{self.port}".encode()

    @property
    def log(self) -> Path:
        return self.folder / f"{self.port}.log"

    def read(self) -> tuple[int, list[str]]:
        """Process id and arguments; (0, []) when none was ever started."""
        try:
            kept = json.loads((self.folder / f"{self.port}.json").read_text())
            return int(kept["pid"]), [str(word) for word in kept["arguments"]]
        except (OSError, ValueError, KeyError, TypeError):
            return 0, []

    def write(self, pid: int, arguments: list[str]) -> None:
        beside = self.folder / f".{self.port}.json"
        beside.write_text(json.dumps({"pid": pid, "arguments": arguments}) + "\n")
        os.replace(beside, self.folder / f"{self.port}.json")

    def running_pid(self) -> int:
        """The server's process; 0: it does not run. One that merely has its number is not taken for it."""
        for child in _children:
            child.poll()
        pid = self.read()[0]
        return pid if pid and _guardian.carriers(self.marker).get(pid) == self.marker else 0

    def tail(self) -> str:
        """The last lines of its log."""
        try:
            return "\n".join(self.log.read_text("utf-8", "replace").splitlines()[-_TAIL_LINES:])
        except OSError:
            return ""

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else starts or ends it meanwhile. Held for as long as that takes, not while it loads."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{self.port}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def end(self, timeout_s: float) -> bool:
        """Asks the server to end, by force at the deadline; its core never outlives it. Whether one ran."""
        with self.alone():
            return self._end(timeout_s)

    def _end(self, timeout_s: float) -> bool:
        pid = self.running_pid()
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            deadline = time.monotonic() + timeout_s
            while self.running_pid() and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        _guardian.kill_all(self.marker)  # also a core whose server was killed
        return bool(pid)


def records(folder: Path) -> list[Record]:
    """Every server that was ever started from ``folder``, by port."""
    return [Record(folder, int(file.stem)) for file in sorted(folder.glob("*.json")) if file.stem.isdigit()]


class Server:
    """The server that the settings describe. Methods block; any thread. ``FatalError``: the settings cannot be one."""

    def __init__(self, engine: Engine, model: str) -> None:
        url = urllib.parse.urlsplit(engine.http_url)
        if url.hostname not in _LOCAL or url.scheme != "http" or url.path.rstrip("/") != "/v1":
            raise FatalError(
                f"engine.http_serve starts a server on this machine: engine.http_url must be like "
                f"http://127.0.0.1:8000/v1, not {engine.http_url}"
            )
        self.record = Record(Path(engine.http_serve_folder), url.port or 80)
        self.arguments = _arguments(engine, url.hostname, self.record.port, model)
        self._key = engine.http_api_key
        self._log = logs.get("gpu_workers")

    def ensure(self, suspect: int = 0) -> int:
        """The process id of a running server: found, else started (it loads for a while then).

        ``suspect`` was seen dead or silent: if it still runs it is ended first. Raises ``FatalError``.
        """
        with self.record.alone():
            pid = self.record.running_pid()
            if pid and pid == suspect:
                self._log.warning("engine.server_replaced", pid=pid)
                self.record._end(0.0)
                pid = 0
            if not pid:
                return self._start()
            if self.record.read()[1] != self.arguments:
                raise FatalError(
                    f"the server on port {self.record.port} (process {pid}) runs with other arguments than the "
                    "settings ask for; `headrace engine stop` ends it, the next start of a worker starts it anew"
                )
            self._log.info("engine.server_found", pid=pid, port=self.record.port)
            return pid

    def _start(self) -> int:
        record = self.record
        _guardian.kill_all(record.marker)  # the core of a server that was killed
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", record.port)) == 0:
                raise FatalError(
                    f"port {record.port} is in use by something else than our server; choose another in "
                    "engine.http_url, or unset engine.http_serve to use what answers there"
                )
        with record.log.open("ab") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(os.environ),
                start_new_session=True,
            )
        _children.append(child)
        record.write(child.pid, self.arguments)
        self._log.info("engine.server_started", pid=child.pid, port=record.port, log=str(record.log))
        return child.pid

    def _environment(self, ours: Mapping[str, str]) -> dict[str, str]:
        """Ours without what concerns the worker alone: its guard's marker, its settings, the database's password."""
        kept = {
            name: value
            for name, value in ours.items()
            if name == _STACK_MARKER or not name.startswith(settings.ENV_PREFIX)
        }
        key = {"VLLM_API_KEY": self._key} if self._key else {}
        own = {MARKER: self.record.marker.decode().partition("=")[2], "SPT_NOENV": "1"}
        return kept | vllm_profile.environment() | key | own

    def must_run(self) -> None:
        """Raises ``FatalError`` with the end of its log when the server has ended."""
        if not self.record.running_pid():
            raise FatalError(
                f"the model server ended while it started; the end of {self.record.log}:\n{self.record.tail()}"
            )


def _arguments(engine: Engine, host: str, port: int, model: str) -> list[str]:
    """Command line of ``vllm.entrypoints.openai.api_server``."""
    wanted: dict[str, Any] = {
        "host": host,
        "port": port,
        "served_model_name": model,
        "generation_config": "vllm",  # a request means the same in every pool
        "enable_prompt_tokens_details": True,
        "disable_uvicorn_access_log": True,
    }
    # One more than we ever ask at once, so that a check finds a free place.
    wanted |= vllm_profile.engine_arguments(engine) | {"max_num_seqs": engine.slots + 1} | engine.vllm
    return command_line(wanted)


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments of vLLM's engine or server, by name, as words of its command lines."""
    words: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, dict):
            words += [f"--{flag}", json.dumps(value)]
        elif value is not None:
            words += [f"--{flag}", *map(str, value if isinstance(value, list) else [value])]
    return words
