"""The real parts that tests run against. Each starts with the first test that asks for it and ends with the run.

A test gets its own database (copied from a migrated template) and its own topic prefix, so tests do
not see each other and nothing needs cleaning between them.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from confluent_kafka.admin import AdminClient

from contract import settings as contract_settings
from contract.settings import Settings
from headrace.stack.kafka import KafkaServer
from headrace.stack.postgres import PostgresServer

# Machines differ in speed by more than any deadline for one example could allow.
hypothesis.settings.register_profile(
    "headrace", deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
# A night's worth: pytest --hypothesis-profile=long, and --hypothesis-seed=N to see the same again.
hypothesis.settings.register_profile("long", hypothesis.settings.get_profile("headrace"), max_examples=3_000)
hypothesis.settings.load_profile("headrace")

_TEMPLATE = "template_headrace"
_numbers = itertools.count(1)

for _name in [name for name in os.environ if name.startswith(contract_settings.ENV_PREFIX) and "__" in name]:
    # A developer's own settings must not decide how tests end; children of tests inherit this environment.
    del os.environ[_name]


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under ``pytest -n`` some tests stay together in one process, one by one, in their order.

    Those of real engines, because two engines do not fit the cores; the engines' conformance suite, because its
    tests share an engine, and some end with a new one.
    """
    for item in items:
        if item.get_closest_marker("vllm") or "test_engines" in item.nodeid:
            item.add_marker(pytest.mark.xdist_group("engines"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Tests that share an engine and yet are torn apart fail in ways that nobody understands: say it at once."""
    if hasattr(session.config, "workerinput"):
        for item in session.items:
            if item.get_closest_marker("xdist_group") and "@" not in item.nodeid:
                raise pytest.UsageError(f"pytest-xdist ignores the group of {item.nodeid}: run with --dist loadgroup")


@pytest.fixture(scope="session")
def session_folder() -> Iterator[Path]:
    """A folder for servers' data. Not pytest's own: Postgres' system user must be able to walk to it."""
    folder = Path(tempfile.mkdtemp(prefix="headrace-tests-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def kafka(session_folder: Path) -> Iterator[str]:
    """Bootstrap servers of a real broker, shared by the run. Tests that break a broker start their own."""
    server = KafkaServer(session_folder / "kafka")
    server.start()
    yield server.bootstrap_servers
    server.stop()


@pytest.fixture(scope="session")
def postgres_server(session_folder: Path) -> Iterator[PostgresServer]:
    """A real Postgres, shared by the run. Tests that break one start their own."""
    server = PostgresServer(session_folder / "postgres", {"fsync": "off"})
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def postgres_template(postgres_server: PostgresServer) -> str:
    """Name of a migrated database that nobody is connected to, to be copied."""
    _execute(postgres_server, f"CREATE DATABASE {_TEMPLATE}")
    if importlib.util.find_spec("storage.migrations"):
        importlib.import_module("storage.migrations").upgrade(postgres_server.url_of(_TEMPLATE))
    return _TEMPLATE


@pytest.fixture
def postgres_url(postgres_server: PostgresServer, postgres_template: str) -> Iterator[str]:
    """URL of a fresh, migrated database of this test's own."""
    name = f"test_{next(_numbers)}"
    _execute(postgres_server, f"CREATE DATABASE {name} TEMPLATE {postgres_template} STRATEGY file_copy")
    yield postgres_server.url_of(name)
    _execute(postgres_server, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def topic_prefix(kafka: str) -> Iterator[str]:
    """A prefix of this test's own; topics that carry it are deleted after the test."""
    prefix = f"t{secrets.token_hex(5)}"
    yield prefix
    admin = AdminClient({"bootstrap.servers": kafka})
    topics = [name for name in admin.list_topics(timeout=10).topics if name.startswith(f"{prefix}.")]
    if topics:
        for future in admin.delete_topics(topics, operation_timeout=10).values():
            future.result(timeout=15)


@pytest.fixture
def settings(kafka: str, postgres_url: str, topic_prefix: str) -> Settings:
    """Settings for this test's database and topics (to be created), few partitions, an engine that answers at once."""
    return contract_settings.build(
        {
            "kafka": {"bootstrap_servers": kafka, "session_timeout_ms": 6_000},
            "topics": {"prefix": topic_prefix, "partitions": 4, "reply_partitions": 4},
            "postgres": {"url": postgres_url},
            "engine": {
                "kind": "simulated",
                "simulated_prefill_tokens_per_s": 0,
                "simulated_step_ms": 0,
                "simulated_step_ms_per_request": 0,
                "simulated_faults": True,
            },
        }
    )


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The tiny model, made once and kept over runs."""
    from headrace.stack.model import make_tiny_model

    return make_tiny_model(Path(__file__).parents[1] / ".headrace" / "tiny-model")


def _execute(server: PostgresServer, statement: str) -> None:
    import psycopg

    with psycopg.connect(server.url_of("postgres"), autocommit=True) as connection:
        connection.execute(statement.encode())
