"""What we ship to run elsewhere: the compose file, the image, the example settings, the pins.

There is no Docker engine where tests run, so the files are held against the Compose Specification's schema
and against what the code really has: settings, commands, folders, jars.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import yaml

from contract import settings
from headrace import cli
from headrace.stack import kafka as stack_kafka
from tests.data import FOLDER

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text("utf-8")


def substituted(value: str) -> str:
    """``value`` with ``${NAME:-default}`` replaced by its default, as compose does when nothing is set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)


def test_compose_file_follows_the_specification() -> None:
    schema = yaml.safe_load((FOLDER / "compose-spec" / "compose-spec.json").read_text("utf-8"))
    jsonschema.Draft7Validator(schema).validate(COMPOSE)
    broken = COMPOSE | {"services": SERVICES | {"worker": SERVICES["worker"] | {"stop_grace_periode": "45s"}}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft7Validator(schema).validate(broken)


def test_every_service_has_an_image_and_every_build_its_files() -> None:
    assert {"kafka", "postgres", "init", "worker"} <= set(SERVICES)
    for service in SERVICES.values():
        assert service["image"]
        if build := service.get("build"):
            context = ROOT / build["context"]
            assert (context / build["dockerfile"]).is_file()
            assert set(build["args"]) <= set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))


def test_services_wait_only_for_services_that_tell_when_they_are_ready() -> None:
    for name, service in SERVICES.items():
        for needed, how in service.get("depends_on", {}).items():
            if how["condition"] == "service_healthy":
                assert "healthcheck" in SERVICES[needed], f"{name} waits for {needed}"
            else:
                assert (how["condition"], SERVICES[needed]["restart"]) == ("service_completed_successfully", "no")


def test_named_volumes_are_declared_and_used() -> None:
    mounts = [substituted(mount).split(":")[0] for service in SERVICES.values() for mount in service.get("volumes", ())]
    assert set(mounts) == set(COMPOSE["volumes"])


@pytest.mark.parametrize("name", ["init", "worker"])
def test_environment_of_a_service_is_real_settings_that_point_at_its_neighbours(name: str) -> None:
    environ = {variable: substituted(value) for variable, value in SERVICES[name]["environment"].items()}
    loaded = settings.load(environ=environ)
    host, _, port = loaded.kafka.bootstrap_servers.partition(":")
    listeners = SERVICES[host]["environment"]["KAFKA_ADVERTISED_LISTENERS"]
    assert f"//{host}:{port}" in listeners
    assert f"@postgres:5432/{SERVICES['postgres']['environment']['POSTGRES_DB']}" in loaded.postgres.url
    assert all(variable.startswith(settings.ENV_PREFIX) for variable in environ)


def test_worker_has_time_to_drain_and_its_port_is_the_one_that_is_probed() -> None:
    worker = SERVICES["worker"]
    environ = {variable: substituted(value) for variable, value in worker["environment"].items()}
    loaded = settings.load(environ=environ)
    assert float(worker["stop_grace_period"].rstrip("s")) > loaded.worker.drain_timeout_s
    assert f":{loaded.worker.http_port}/readyz" in worker["healthcheck"]["test"][-1]
    assert worker["expose"] == [str(loaded.worker.http_port)]


def test_commands_of_the_services_are_commands_of_the_program() -> None:
    entrypoint = yaml.safe_load(re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.MULTILINE)[0])
    assert entrypoint == ["headrace"]
    calls = [entrypoint + SERVICES["worker"]["command"], *map(shlex.split, SERVICES["init"]["command"][0].splitlines())]
    for program, *words in calls:
        if program == "headrace":
            command: Any = cli.main
            for word in words:
                command = command.get_command(click.Context(command), word)
                assert command is not None, words
        else:
            assert (program, words[0]) == ("python", "-m")
            assert (ROOT / (words[1].replace(".", "/") + ".py")).is_file()


def test_broker_of_the_compose_file_is_the_version_that_tests_run() -> None:
    pom = ElementTree.parse(ROOT / "deploy" / "kafka" / "pom.xml")
    versions = {node.text for node in pom.findall(".//{*}dependency[{*}groupId='org.apache.kafka']/{*}version")}
    assert {f"apache/kafka:{version}" for version in versions} == {SERVICES["kafka"]["image"]}
    (jar,) = stack_kafka.libs_folder().glob("kafka_2.13-*.jar")
    assert {jar.stem.removeprefix("kafka_2.13-")} == versions


def test_image_copies_every_package_and_nothing_that_is_ignored() -> None:
    copied = {word for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE) for word in line.split()[:-1]}
    packages = {folder.parent.name for folder in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks"}
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line.startswith("!")}
    assert copied == packages | {"requirements", "pyproject.toml", "README.md"}
    assert kept == copied


def test_example_settings_are_settings() -> None:
    loaded = settings.load(ROOT / "deploy" / "headrace.example.toml", {})
    assert loaded.topics.replication == 3
    assert loaded.engine.vllm["tensor_parallel_size"] == 1


def test_no_file_names_a_registry() -> None:
    """A fresh clone must build wherever its user's package manager points."""
    # In two halves: this file is looked at too.
    halves = ["pypi .org", "python hosted", "repo. maven", "maven .org", "docker .io", "ghcr .io", "download. pytorch"]
    hosts = [half.replace(" ", "") for half in halves]
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        text = (ROOT / name).read_text("utf-8", "replace") if (ROOT / name).is_file() else ""
        assert not [host for host in hosts if host in text], name


def test_every_package_of_the_pins_is_pinned() -> None:
    for line in (ROOT / "requirements" / "dev.txt").read_text("utf-8").splitlines():
        assert re.fullmatch(r"[a-z0-9][a-z0-9._-]*(\[[a-z,]+\])?==[^ ]+( ;.*)?", line), line
