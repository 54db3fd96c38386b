"""The demo in order: servers, worker, load, report, and a clean end however it comes."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from broker import topics
from contract import logs
from contract.errors import FatalError
from contract.settings import Log
from headrace.demo import report, screen
from headrace.demo.load import Sizes
from headrace.demo.setup import Worker, demo_settings
from headrace.demo.traffic import Traffic
from headrace.demo.verdict import judge
from headrace.stack import processes
from headrace.stack.machine import Machine
from storage import cost, migrations, reports
from storage.store import Store

EXIT_OK, EXIT_UNSOUND, EXIT_INTERRUPTED = 0, 1, 130
_LOOK_EVERY_S = 0.2
_STUCK_S = 120.0
"""Without any new result for so long, what is open counts as lost."""
_LAST_ANSWERS_S = 15.0
_HEARTBEATS = 3


def run(sizes: Sizes, folder: Path, *, once: bool) -> int:
    """Runs the demo in ``folder``, whose earlier content is removed; gives the exit status.

    ``once``: ends after the load. Else a light load goes on until Ctrl-C or SIGTERM. Raises
    ``StackError`` when a part does not start.
    """
    processes.interrupt_on_signals()
    logs.configure(Log(level="error"))  # what librdkafka says of a broker that comes and goes is no news here
    out = screen.console()
    try:
        with contextlib.ExitStack() as stack:
            return _Demo(out, sizes, folder, stack).run(once)
    except KeyboardInterrupt:
        out.print("interrupted; everything is stopped")
        return EXIT_INTERRUPTED


class _Demo:
    def __init__(self, out: Console, sizes: Sizes, folder: Path, stack: contextlib.ExitStack) -> None:
        self._out = out
        self._sizes = sizes
        self._folder = folder
        self._stack = stack
        self._since_ms = int(time.time() * 1000)

    def run(self, once: bool) -> int:
        self._set_up()
        self._put_load()
        if not once:
            self._report()
            self._keep_running()
        with screen.step(self._out, "worker drained and stopped"):
            page = self._worker.page("/metrics") or ""
            self._worker.stop()
        self._traffic.stop()
        self._report(page)
        verdict = judge(self._store, self._tally)
        report.print_verdict(self._out, verdict)
        return EXIT_OK if verdict.sound else EXIT_UNSOUND

    def _set_up(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        machine = Machine(self._folder)
        self._stack.callback(machine.stop)
        with screen.step(self._out, "broker and database"):
            machine.start()
        environ = {**os.environ, **machine.environment}
        self._settings = demo_settings(self._folder, environ)
        with screen.step(self._out, "tables and topics"):
            migrations.upgrade(self._settings.postgres.url)
            topics.ensure(self._settings)
        self._store = Store(self._settings.postgres)
        self._stack.callback(self._store.close)
        self._worker = Worker(self._settings, self._folder)
        self._stack.callback(self._worker.stop)
        self._worker.child.start()
        self._traffic = Traffic(self._settings, f"demo-{self._since_ms}")
        self._tally = self._traffic.tally
        self._stack.callback(self._traffic.stop)
        self._traffic.watch()

    def _put_load(self) -> None:
        engine = self._settings.engine
        model = f", {Path(engine.model_path).name}" if engine.model_path else ""
        with screen.step(self._out, f"worker ready ({engine.kind}{model})"):
            self._worker.wait_until_ready()
        self._traffic.publish_file(self._folder / "offline.jsonl", self._sizes.offline_requests)
        self._traffic.publish_online(self._sizes.online_per_s, self._sizes.online_s)
        with screen.LoadScreen(self._out, self._tally) as shown:
            self._wait(lambda: not self._traffic.publishing and not self._tally.open, shown.update)

    def _keep_running(self) -> None:
        self._out.print("\nAnother terminal can look around with these:")
        for name in ("kafka.bootstrap_servers", "postgres.url", "topics.prefix"):
            section, field = name.split(".")
            value = getattr(getattr(self._settings, section), field)
            self._out.print(f"  export HEADRACE_{section.upper()}__{field.upper()}='{value}'", soft_wrap=True)
        self._traffic.publish_online(self._sizes.light_per_s)
        with contextlib.suppress(KeyboardInterrupt), screen.LiveScreen(self._out, self._tally) as shown:
            self._wait(lambda: False, shown.update)
        self._traffic.hold()
        with screen.step(self._out, "last answers"), contextlib.suppress(TimeoutError):
            self._wait(lambda: not self._tally.open, lambda: None, _LAST_ANSWERS_S)

    def _wait(self, done: Callable[[], bool], show: Callable[[], None], timeout_s: float = float("inf")) -> None:
        """Until ``done``, or nothing moves any more, or the time is over. Raises what broke meanwhile."""
        deadline_s = time.monotonic() + timeout_s
        moved_s, seen = time.monotonic(), -1
        while not done() and time.monotonic() < deadline_s:
            self._traffic.check()
            if not self._worker.child.running:
                raise FatalError(
                    f"the worker ended with status {self._worker.child.exit_status}\n{self._worker.child.tail()}"
                )
            if len(self._tally.seen) != seen or not self._tally.open:
                moved_s, seen = time.monotonic(), len(self._tally.seen)
            elif time.monotonic() - moved_s > _STUCK_S:
                self._out.print(f"[red]no result for {_STUCK_S:.0f} s; giving up on {self._tally.open}[/]")
                return
            show()
            time.sleep(_LOOK_EVERY_S)

    def _report(self, metrics_page: str | None = None) -> None:
        page = self._worker.page("/metrics") if metrics_page is None else metrics_page
        self._out.print()
        self._out.print(report.throughput(reports.latency_table(self._store, self._since_ms)))
        self._out.print(report.windows(page or ""))
        self._out.print(report.cost(self._cost()))

    def _cost(self) -> cost.CostReport:
        """Nothing is in flight here, but a worker tells its time a heartbeat later than its answers."""
        deadline_s = time.monotonic() + _HEARTBEATS * self._settings.worker.heartbeat_s
        while True:
            found = cost.cost_report(self._store, "business_line", self._since_ms)
            if not found.unpaid["in_flight"].ns or time.monotonic() > deadline_s:
                return found
            time.sleep(_LOOK_EVERY_S)
