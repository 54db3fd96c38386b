"""The command as a process: light imports, clean ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

HEAVY = "torch, vllm, sqlalchemy, psycopg, confluent_kafka, kafka, numpy, transformers"


@pytest.mark.parametrize("args", [["--help"], ["config", "show"], ["schema"]])
def test_light_commands_load_no_database_no_engine_no_kafka(args: list[str]) -> None:
    code = f"""if True:
        import sys
        from headrace.cli import main
        main({args!r}, standalone_mode=False)
        heavy = {{name.strip() for name in {HEAVY!r}.split(",")}} & set(sys.modules)
        assert not heavy, heavy
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_client_loads_no_database_and_no_engine() -> None:
    code = """if True:
        import sys
        from headrace import AsyncClient, Client
        heavy = {"torch", "vllm", "sqlalchemy", "psycopg", "storage", "click"} & set(sys.modules)
        assert not heavy, heavy
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_error_of_a_real_process_is_one_line_and_status_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "config", "show"],
        env={**os.environ, "HEADRACE_LOG__LEVEL": "loud"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "Error: setting log.level = 'loud': must be one of debug, info, warning, error\n"


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_stack_up_prints_what_to_export_and_leaves_nothing_behind(session_folder: Path, signal_number: int) -> None:
    import psycopg

    folder = session_folder / f"stack-{signal_number}"
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", "stack", "up", "--folder", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        if (ready := process.stderr.readline()) != "# ready; Ctrl-C stops it\n":
            pytest.fail(ready + process.stderr.read())
        script = f"{process.stdout.readline()}{process.stdout.readline()}env"
        exported = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
        environ = dict(line.partition("=")[::2] for line in exported.splitlines())
        assert "headrace.results" in topics_of(environ["HEADRACE_KAFKA__BOOTSTRAP_SERVERS"])
        with psycopg.connect(environ["HEADRACE_POSTGRES__URL"]) as connection:
            assert connection.execute("SELECT count(*) FROM results").fetchone() == (0,)
        process.send_signal(signal_number)
        assert process.wait(60) == 0
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(environ["HEADRACE_POSTGRES__URL"])


def topics_of(bootstrap_servers: str) -> list[str]:
    """Through a client that is gone before its broker is: librdkafka would tell of that on standard error."""
    return list(AdminClient({"bootstrap.servers": bootstrap_servers}).list_topics(timeout=10).topics)
