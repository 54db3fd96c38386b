"""The demo as a user runs it, small and with the simulated engine: it ends sound, and leaves nothing behind."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest
from confluent_kafka.admin import AdminClient

from headrace.stack.processes import wait_for

SMALL = ("--offline", "60", "--online-s", "3", "--online-per-s", "10")
LONG = ("--offline", "60", "--online-s", "120", "--online-per-s", "10")


class Demo:
    """A running ``headrace demo``; knows every process that came of it."""

    def __init__(self, folder: Path, *args: str, **environ: str) -> None:
        self.output = folder / "output.txt"
        self.token = secrets.token_hex(16)
        command = [sys.executable, "-m", "headrace", "demo", "--folder", str(folder / "demo"), *args]
        environment = {**os.environ, "HEADRACE_ENGINE__KIND": "simulated", "HEADRACE_TEST_TOKEN": self.token, **environ}
        with self.output.open("wb") as stream:
            self.process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment)
        self.family: dict[int, psutil.Process] = {}

    def text(self) -> str:
        return self.output.read_text("utf-8", "replace")

    def wait_text(self, text: str, timeout_s: float = 90.0) -> None:
        def there() -> bool:
            assert self.process.poll() is None or text in self.text(), self.text()
            return text in self.text()

        wait_for(there, timeout_s, f"the demo says {text!r}")

    def remember(self) -> None:
        """Everything that runs because of the demo now."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            self.family[process.pid] = process
        assert {"java", "postgres"} <= self.names()

    def names(self) -> set[str]:
        """Programs that run under the demo now."""
        return {process.name() for process in psutil.Process(self.process.pid).children(recursive=True)}

    def left(self) -> list[str]:
        """Processes of the demo that still run: those remembered, and any with its token in the environment."""
        found = {process for process in self.family.values() if process.is_running()}
        for process in psutil.process_iter():
            try:
                if process.environ().get("HEADRACE_TEST_TOKEN") == self.token:
                    found.add(process)
            except psutil.Error:
                continue
        return [str(process) for process in found if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def folder(session_folder: Path) -> Path:
    made = session_folder / f"demo-{secrets.token_hex(4)}"
    made.mkdir()
    return made


@pytest.fixture
def demos() -> Iterator[list[Demo]]:
    started: list[Demo] = []
    yield started
    for demo in started:
        demo.process.kill()
        demo.process.wait()


def test_demo_ends_by_itself_sound_and_reports(folder: Path, demos: list[Demo]) -> None:
    demos.append(demo := Demo(folder, "--once", *SMALL))
    demo.wait_text("worker ready")
    demo.remember()
    assert demo.process.wait(120) == 0, demo.text()
    assert demo.left() == []
    text = demo.text()
    for part in ("lost: 0", "doubled: 0", "reconciliation: 0", "Per class and bucket", "Windows", "bill", "idle"):
        assert part in text
    for line in ("search", "support", "ads", "archive", "catalogue"):
        assert line in text
    assert "60" in next(line for line in text.splitlines() if "│ offline" in line and "60" in line)


def test_demo_uses_the_servers_that_the_settings_name_and_lets_them_run(
    folder: Path, demos: list[Demo], kafka: str, postgres_url: str, topic_prefix: str
) -> None:
    environ = {
        "HEADRACE_KAFKA__BOOTSTRAP_SERVERS": kafka,
        "HEADRACE_POSTGRES__URL": postgres_url,
        "HEADRACE_TOPICS__PREFIX": topic_prefix,
    }
    demos.append(demo := Demo(folder, "--once", *SMALL, **environ))
    demo.wait_text("worker ready")
    assert not {"java", "postgres"} & demo.names()
    assert demo.process.wait(120) == 0, demo.text()
    with psycopg.connect(postgres_url) as connection:
        rows = connection.execute("SELECT count(*) FROM results WHERE id LIKE 'offline-%'").fetchone()
    assert rows == (60,)
    assert f"{topic_prefix}.results" in AdminClient({"bootstrap.servers": kafka}).list_topics(timeout=10).topics


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_demo_told_to_stop_in_the_middle_leaves_no_process(folder: Path, demos: list[Demo], signal_number: int) -> None:
    demos.append(demo := Demo(folder, "--once", *LONG))
    demo.wait_text("worker ready")
    demo.remember()
    demo.process.send_signal(signal_number)
    assert demo.process.wait(60) == 130, demo.text()
    assert demo.left() == []
    assert "Traceback" not in demo.text()


def test_killed_demo_leaves_no_process(folder: Path, demos: list[Demo]) -> None:
    demos.append(demo := Demo(folder, "--once", *LONG))
    demo.wait_text("worker ready")
    demo.remember()
    demo.process.kill()
    demo.process.wait(10)
    wait_for(lambda: not demo.left(), 20, "all that it started is gone")


def test_demo_goes_on_until_told_to_stop_and_is_sound_then(folder: Path, demos: list[Demo]) -> None:
    demos.append(demo := Demo(folder, *SMALL))
    demo.wait_text("Another terminal can look around")
    demo.remember()
    demo.process.send_signal(signal.SIGINT)
    assert demo.process.wait(60) == 0, demo.text()
    assert demo.left() == []
    assert "reconciliation: 0" in demo.text()


def test_demo_whose_worker_cannot_start_says_why_and_leaves_no_process(folder: Path, demos: list[Demo]) -> None:
    demos.append(demo := Demo(folder, "--once", *SMALL))
    demo.wait_text("tables and topics")
    # The worker is the one child that is a Python of ours; it dies before it is ready, or while it serves.
    worker = wait_for(lambda: next(iter(workers(demo)), None), 30, "the worker runs")
    worker.kill()
    assert demo.process.wait(60) == 2, demo.text()
    assert "worker ended with status -9" in demo.text()
    assert "Traceback" not in demo.text()
    assert demo.left() == []


def workers(demo: Demo) -> list[psutil.Process]:
    children = psutil.Process(demo.process.pid).children()
    return [child for child in children if child.cmdline()[-2:] == ["headrace", "worker"]]
