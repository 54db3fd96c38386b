"""The broker and the database start, keep their data over a crash, and end with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from contract.settings import Settings
from headrace.stack import processes
from headrace.stack.kafka import KafkaServer
from headrace.stack.postgres import PostgresServer
from headrace.stack.processes import Child, StackError, wait_for

HERE = Path(__file__).parents[2]


def test_broker_keeps_topics_and_address_over_a_kill(session_folder: Path) -> None:
    server = KafkaServer(session_folder / "killed-kafka")
    server.start()
    try:
        address = server.bootstrap_servers
        admin = AdminClient({"bootstrap.servers": address})
        admin.create_topics([NewTopic("kept", 1)])["kept"].result(10)
        server.kill()
        assert not server.running
        server.start()
        assert server.bootstrap_servers == address
        assert "kept" in AdminClient({"bootstrap.servers": address}).list_topics(timeout=10).topics
    finally:
        server.stop()


def test_broker_that_dies_early_shows_its_log(session_folder: Path) -> None:
    server = KafkaServer(session_folder / "broken-kafka", {"log.retention.ms": "never"})
    with pytest.raises(StackError, match=r"log\.retention\.ms"):
        server.start()
    assert not server.running


def test_missing_jars_say_what_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_KAFKA_LIBS", str(tmp_path))
    with pytest.raises(StackError, match="make setup"):
        KafkaServer(tmp_path / "kafka").start()


def test_database_keeps_committed_rows_over_a_kill(session_folder: Path) -> None:
    server = PostgresServer(session_folder / "killed-postgres")
    server.start()
    try:
        with psycopg.connect(server.url) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 1 AS a")
        server.kill()
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(server.url)
        server.start()
        with psycopg.connect(server.url) as connection:
            assert connection.execute("SELECT a FROM kept").fetchone() == (1,)
    finally:
        server.stop()


def test_servers_in_a_relative_folder_start(session_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(session_folder)
    servers = (PostgresServer(Path("relative/postgres")), KafkaServer(Path("relative/kafka")))
    server: PostgresServer | KafkaServer
    try:
        for server in servers:
            server.start()
            assert (session_folder / "relative" / server.log.parent.name / "data").is_dir()
    finally:
        for server in servers:
            server.stop()


def test_database_in_a_deep_folder_has_a_socket_that_fits(session_folder: Path) -> None:
    server = PostgresServer(session_folder / ("deep-" + "x" * 120))
    server.start()
    try:
        with psycopg.connect(server.url) as connection:
            assert connection.info.dbname == "headrace"
    finally:
        server.stop()


def test_child_that_ends_early_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    child = Child("early", [sys.executable, "-c", "print('last words'); raise SystemExit(3)"], tmp_path / "log")
    child.start()
    with pytest.raises(StackError, match=r"ended with status 3 before never\nlast words"):
        child.wait_until(lambda: False, 20, "never")


def test_child_deaf_to_term_is_killed_at_the_deadline(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    child = Child("deaf", [sys.executable, "-c", code], tmp_path / "log")
    child.start()
    child.wait_until(lambda: "deaf" in child.tail(), 20, "it is deaf")
    assert child.stop(0.2) is False
    assert child.exit_status == -signal.SIGKILL


@pytest.mark.parametrize("how", ["kill -9", "kill -9 of the whole group", "normal end"])
def test_children_and_their_children_end_with_a_parent_however_it_ends(tmp_path: Path, how: str) -> None:
    grandchild = "import time; time.sleep(600)"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}], start_new_session=True)"
    parent = f"""if True:
        import os, sys, time
        from pathlib import Path
        from headrace.stack import processes
        child = processes.Child("child", [sys.executable, "-c", {child!r}], Path({str(tmp_path / "log")!r}))
        child.start()
        if os.fork() == 0:
            os.close(0), os.close(1)
            time.sleep(20)  # a fork that lives on must not keep the children alive
            os._exit(0)
        print(processes._guard.marker(), flush=True)
        sys.stdin.read()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", parent],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=HERE,
        text=True,
        start_new_session=True,
    )
    with process:
        assert process.stdout is not None
        marker = process.stdout.readline().strip()
        wait_for(lambda: len(carriers(marker)) == 2, 20, "child and grandchild run")
        if how == "kill -9":
            process.kill()
        elif how == "normal end":
            process.communicate("")
        else:
            os.killpg(process.pid, signal.SIGKILL)
    wait_for(lambda: not carriers(marker), 10, "both are gone")


def carriers(marker: str) -> list[str]:
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and f"{processes.MARKER}={marker}".encode() in (folder / "environ").read_bytes():
                found.append(folder.name)
        except OSError:
            continue
    return found


def test_each_test_has_its_own_migrated_database(postgres_url: str, postgres_server: PostgresServer) -> None:
    with psycopg.connect(postgres_url) as connection:
        tables = connection.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'").fetchone()
    assert tables is not None
    assert tables[0] > 3
    assert postgres_url != postgres_server.url


def test_settings_of_a_test_name_real_servers(settings: Settings) -> None:
    assert AdminClient({"bootstrap.servers": settings.kafka.bootstrap_servers}).list_topics(timeout=10).brokers
    with psycopg.connect(settings.postgres.url) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
