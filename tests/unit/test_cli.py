"""The command line's own work: what it lists, how it fails, and `config show`."""

from __future__ import annotations

import importlib
import json
import sys
import tomllib
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner, Result

from contract import settings
from headrace import cli
from headrace.commands import config


def run(*args: str, **environ: str) -> Result:
    return CliRunner().invoke(cli.main, args, env=environ, prog_name="headrace")


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_page_says_what_the_command_itself_says(name: str) -> None:
    command = importlib.import_module(f"headrace.commands.{name}").command
    assert isinstance(command, click.Command)
    assert (command.help or "").splitlines()[0] == cli.COMMANDS[name].help
    assert f"\n  {name} " in run("--help").output


def test_every_module_of_a_command_is_listed() -> None:
    folder = Path(config.__file__).parent
    assert {file.stem for file in folder.glob("[!_]*.py")} == set(cli.COMMANDS)


def test_bad_setting_is_one_line_and_status_2() -> None:
    result = run("config", "show", HEADRACE_KAFKA__SESSION_TIMEOUT_MS="soon")
    assert result.exit_code == 2
    assert result.stderr.splitlines() == ["Error: setting kafka.session_timeout_ms = 'soon': must be int, got str"]
    assert result.stdout == ""


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.split(".")[0] in ("storage", "sqlalchemy", "psycopg")]:
        monkeypatch.delitem(sys.modules, module)
    for module in ("sqlalchemy", "psycopg"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "headrace.commands.reconcile", raising=False)
    result = run("reconcile")
    assert result.exit_code == 2
    assert "pip install 'headrace[worker]'" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_unknown_command_is_no_stack_trace() -> None:
    result = run("wroker")
    assert result.exit_code == 2
    assert "wroker" in result.stderr


def test_shown_settings_are_a_file_that_gives_the_same_settings() -> None:
    environ = {
        "HEADRACE_CLASSES__BULK__RANK": "4",
        "HEADRACE_CLIENT__CLASS_NAME": "bulk",
        "HEADRACE_ENGINE__VLLM": '{dtype = "float32", deep = {a = [1, 2.5, true, "ü\\n"]}}',
        "HEADRACE_KAFKA__PROPERTIES": '{"statistics.interval.ms" = 0}',
    }
    shown = run("config", "show", **environ)
    assert shown.exit_code == 0
    assert settings.build(tomllib.loads(shown.output)) == settings.load(environ=environ)


def test_shown_settings_tell_origin_unit_bound_and_meaning() -> None:
    environ = {"HEADRACE_KAFKA__SESSION_TIMEOUT_MS": "7000", "HEADRACE_BUCKETS__EDGES__SHORT": "10"}
    rows = {
        row["field"]: row for row in map(json.loads, run("config", "show", "--json", **environ).output.splitlines())
    }
    assert rows["kafka.session_timeout_ms"] == {
        "field": "kafka.session_timeout_ms",
        "value": 7000,
        "origin": "$HEADRACE_KAFKA__SESSION_TIMEOUT_MS",
        "unit": "milliseconds",
        "bound": "≥ 1000, ≤ 300000",
        "meaning": "A killed worker's partitions move after this.",
    }
    assert rows["buckets.edges"]["origin"] == "$HEADRACE_BUCKETS__EDGES__SHORT"
    assert rows["engine.kind"]["bound"] == "one of vllm, http, simulated"
    assert rows["postgres.connect_timeout_s"]["unit"] == "seconds"
    assert set(rows) == {field for field, _, _ in settings.fields(settings.load(environ=environ))}


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:hunter2@host:5432/db",
        "postgresql+psycopg://user:hunter2@host/db?sslmode=require",
        "postgresql://user:hun@ter2:hunter2@host/db",
        "postgresql://host/db?user=u&password=hunter2",
        "host=h password=hunter2 dbname=d",
        "host=h password = 'hunter2 with \\' quote' dbname=d",
    ],
)
def test_passwords_in_the_database_url_are_masked(url: str) -> None:
    for form in ((), ("--json",)):
        output = run("config", "show", *form, HEADRACE_POSTGRES__URL=url).output
        assert "hunter2" not in output
        assert "ter2" not in output
        assert config.MASK in output


def test_secrets_among_client_properties_are_masked_and_the_rest_is_not() -> None:
    properties = (
        '{"sasl.password" = "hunter2", "ssl.key.password" = "hunter2", "ssl.key.pem" = "hunter2", '
        '"sasl.oauthbearer.client.secret" = "hunter2", "sasl.jaas.config" = "x hunter2", "sasl.username" = "visible"}'
    )
    output = run(
        "config", "show", HEADRACE_KAFKA__PROPERTIES=properties, HEADRACE_POOLS__DEFAULT__TOKENIZER="path",
        HEADRACE_ENGINE__HTTP_API_KEY="sk-hunter2",
    ).output  # fmt: skip
    assert "hunter2" not in output
    assert '"sasl.username" = "visible"' in output
    assert 'tokenizer = "path"' in output


def test_every_number_with_a_unit_in_its_name_says_it() -> None:
    for row in config.describe(settings.Settings(), {}):
        if row["field"].endswith(("_s", "_ms", "_bytes", "_tokens", "_usd_per_hour", "_days", "_hours")):
            assert row["unit"], row["field"]


def test_schema_is_printed_as_json() -> None:
    assert "Request" in json.loads(run("schema").output)["$defs"]


def test_settings_file_named_by_option_is_read(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CONFIG", "")  # restored after the test: the option sets it
    file = f"{tmp_path}/some.toml"
    with open(file, "w") as stream:
        stream.write('[topics]\nprefix = "other"\n')
    output = run("--config", file, "config", "show").output
    assert 'prefix = "other"' in output
    assert msgspec.structs.replace(settings.Settings().topics, prefix="other") == settings.load(file, {}).topics
