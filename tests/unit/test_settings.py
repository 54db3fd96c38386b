"""A bad setting names field, value and fix; the file and the environment overlay the defaults."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract import settings
from contract.errors import SettingsError
from contract.settings import Settings


@pytest.mark.parametrize(
    ("tree", "field", "value", "fix"),
    [
        # wrong type, out of bound, unknown word
        ({"kafka": {"session_timeout_ms": "soon"}}, "kafka.session_timeout_ms", "soon", "must be int"),
        ({"kafka": {"session_timeout_ms": 5}}, "kafka.session_timeout_ms", 5, ">= 1000"),
        ({"postgres": {"statement_timeout_s": math.nan}}, "postgres.statement_timeout_s", None, "> 0"),
        ({"engine": {"kind": "magic"}}, "engine.kind", "magic", "one of vllm, http, simulated"),
        ({"engine": {"kind": "http"}}, "engine.http_url", "", 'such as "http://127.0.0.1:8000/v1"'),
        ({"engine": {"kind": "http", "http_url": "host:80"}}, "engine.http_url", "host:80", "must be a URL"),
        ({"engine": {"kind": "http", "http_url": "http://u:p@h"}}, "engine.http_url", "http://u:p@h", "must be a URL"),
        ({"cost": {"gpu_usd_per_hour": "2e3"}}, "cost.gpu_usd_per_hour", "2e3", "matching"),
        ({"kafka": {"bootstrap_servers": ""}}, "kafka.bootstrap_servers", "", "length >= 1"),
        ({"kafka": 3}, "kafka", 3, "must be object"),
        ({"worker": {"classes": ["online", 7]}}, "worker.classes[1]", 7, "must be str"),
        # entries of named tables: the entry is named, not "[...]"
        ({"classes": {"online": {}, "offline": {"rank": "x"}}}, "classes.offline.rank", "x", "must be int"),
        ({"classes": {"online": {"window": {"max_wait_ms": -1}}}}, "classes.online.window.max_wait_ms", -1, ">= 0"),
        ({"buckets": {"edges": {"short": 10, "long": 0}}}, "buckets.edges.long", 0, ">= 1"),
        ({"pools": {"a": {}, "b": {"model": ""}}}, "pools.b.model", "", "length >= 1"),
        # misspelt
        ({"kafka": {"bootstrap": "x"}}, "kafka.bootstrap", "x", "did you mean kafka.bootstrap_servers?"),
        ({"kafak": {}}, "kafak", {}, "did you mean kafka?"),
        ({"classes": {"bulk": {"rank": 1, "rnak": 1}}}, "classes.bulk.rnak", 1, "did you mean classes.bulk.rank?"),
        ({"pools": {"a": {"modell": "m"}}}, "pools.a.modell", "m", "did you mean pools.a.model?"),
        ({"zzz": 1}, "zzz", 1, "see headrace config show"),
        # two settings that do not go together: both are named
        ({"topics": {"min_insync_replicas": 2}}, "topics.min_insync_replicas", 2, "topics.replication = 1"),
        ({"engine": {"max_requests": 8}}, "engine.max_requests", 8, "reserved_slots, 8 in all"),
        (
            {"engine": {"kind": "http", "http_url": "http://h/v1", "http_connections": 8}},
            "engine.http_connections",
            8,
            "reserved_slots, 8 in all",
        ),
        ({"worker": {"pool": "gone"}}, "worker.pool", "gone", "default"),
        ({"client": {"pool": "gone"}}, "client.pool", "gone", "default"),
        ({"client": {"class_name": "gone"}}, "client.class_name", "gone", "online, offline"),
        ({"worker": {"classes": ["gone"]}}, "worker.classes", "gone", "online, offline"),
        ({"worker": {"dead_after_s": 8}}, "worker.dead_after_s", 8.0, "kafka.session_timeout_ms = 8000"),
        ({"postgres": {"key_horizon_days": 3}}, "postgres.key_horizon_days", 3, "topics.retention_hours = 72.0"),
        ({"buckets": {"edges": {"a": 5, "b": 5}}}, "buckets.edges", {"a": 5, "b": 5}, "rise"),
        ({"buckets": {"edges": {}}}, "bucket", {}, "at least one"),
        ({"pools": {}}, "pool", {}, "at least one"),
        ({"pools": {"big": {}}}, "worker.pool", "default", "big"),
        ({"pools": {"default": {}, "a.b": {}}}, "name of a pool", "a.b", "a-z"),
    ],
)
def test_bad_setting_names_field_value_and_fix(tree: dict[str, Any], field: str, value: Any, fix: str) -> None:
    with pytest.raises(SettingsError) as caught:
        settings.build(tree)
    assert caught.value.field == field
    if value is not None:
        assert caught.value.value == value
    assert fix in caught.value.fix
    assert "\n" not in str(caught.value)


def test_every_bounded_number_refuses_nan_and_infinity() -> None:
    for field, value, meta in settings.fields():
        if isinstance(value, float) and meta.le is not None:
            for wrong in (math.nan, math.inf, -math.inf):
                tree: Any = wrong
                for name in reversed(field.split(".")):
                    tree = {name: tree}
                with pytest.raises(SettingsError, match=field):
                    settings.build(tree)


def test_environment_wins_over_the_file_and_origins_say_so(tmp_path: Path) -> None:
    file = tmp_path / "some.toml"
    file.write_text(
        '[kafka]\nbootstrap_servers = "a:1"\nsession_timeout_ms = 9000\n[classes.online.window]\nmax_requests = 7\n'
    )
    environ = {
        "HEADRACE_CONFIG": str(file),
        "HEADRACE_KAFKA__BOOTSTRAP_SERVERS": "b:2",
        "HEADRACE_KAFKA__PROPERTIES": '{"sasl.mechanism" = "PLAIN", "linger.ms" = 5}',
        "HEADRACE_CLASSES__ONLINE__WINDOW__MAX_WAIT_MS": "3",
        "HEADRACE_ENGINE__SIMULATED_FAULTS": "true",
        "HEADRACE_WORKER__CLASSES": '["offline"]',
        "HEADRACE_KAFKA_LIBS": "not a setting: it has no section",
        "OTHER": "x",
    }
    loaded = settings.load(environ=environ)
    assert loaded.kafka.bootstrap_servers == "b:2"
    assert loaded.kafka.session_timeout_ms == 9000
    assert loaded.kafka.properties == {"sasl.mechanism": "PLAIN", "linger.ms": 5}
    assert loaded.classes["online"].window == settings.Window(max_requests=7, max_wait_ms=3)
    assert loaded.classes["online"].reserved_slots == 8, "the other defaults of the class are kept"
    assert loaded.engine.simulated_faults is True
    assert list(loaded.worker_classes) == ["offline"]
    _, origins = settings.read(None, environ)
    assert origins["kafka.bootstrap_servers"] == "$HEADRACE_KAFKA__BOOTSTRAP_SERVERS"
    assert origins["kafka.session_timeout_ms"] == str(file)


def test_one_class_of_the_users_own_replaces_the_default_ones() -> None:
    loaded = settings.build({"classes": {"bulk": {"rank": 3}}, "client": {"class_name": "bulk"}})
    assert list(loaded.classes) == ["bulk"]


def test_classes_are_taken_in_order_of_rank() -> None:
    tree = {"classes": {"late": {"rank": 9}, "first": {"rank": 1}, "mid": {"rank": 5}}, "client": {"class_name": "mid"}}
    assert list(settings.build(tree).worker_classes) == ["first", "mid", "late"]


@pytest.mark.parametrize("content", [b"= 3", b"\xff\xfe", b"[kafka]\n[kafka]"])
def test_file_that_is_not_toml_is_one_line(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(content)
    with pytest.raises(SettingsError, match="is not TOML"):
        settings.load(file, {})


def test_named_file_that_is_not_there_is_an_error_and_the_default_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert settings.load(environ={}) == Settings()
    with pytest.raises(SettingsError, match="cannot be read"):
        settings.load(tmp_path / "gone.toml", {})


def test_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    file = tmp_path / "bom.toml"
    file.write_bytes(b'\xef\xbb\xbf[topics]\nprefix = "p"\n')
    assert settings.load(file, {}).topics.prefix == "p"


@pytest.mark.parametrize("environ", [{"HEADRACE_KAFKA__X": "1", "HEADRACE_KAFKA__X__Y": "2"}])
def test_environment_that_nests_under_a_plain_value_names_the_variable(environ: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match="HEADRACE_KAFKA__X__Y = '2': x is not a table"):
        settings.load(environ=environ)


def test_every_field_says_what_it_means() -> None:
    for field, _, meta in settings.fields():
        assert meta.description, field
        assert meta.description.endswith("."), field


@given(
    st.dictionaries(
        st.sampled_from([name for name, _, _ in settings.fields()]) | st.text("abc._", max_size=12),
        st.text(max_size=12)
        | st.sampled_from(["0", "-1", "1e400", "nan", "{}", "[]", "{a=1}", "[1]", "true", "{", '["x"]']),
        max_size=4,
    )
)
def test_any_environment_gives_settings_or_one_clear_error(given_values: dict[str, str]) -> None:
    environ = {f"HEADRACE_{name.upper().replace('.', '__')}": value for name, value in given_values.items()}
    try:
        settings.load(environ=environ)
    except SettingsError as error:
        assert str(error).count("\n") == 0  # noqa: PT017


def test_what_is_built_can_be_built_again_from_its_own_values() -> None:
    loaded = settings.build(
        {"classes": {"bulk": {"rank": 3}}, "client": {"class_name": "bulk"}, "engine": {"vllm": {"a": [1]}}}
    )
    assert settings.build(msgspec.to_builtins(loaded)) == loaded


def test_child_process_gets_the_same_settings_through_its_environment() -> None:
    tree = {
        "classes": {"bulk": {"rank": 3, "window": {"max_wait_ms": 7}}},
        "client": {"class_name": "bulk"},
        "kafka": {"properties": {"sasl.password": 'a "quoted" ü', "x": 1}},
        "buckets": {"edges": {"a": 1, "b": 2}},
        "pools": {"default": {}, "other": {"model": "m"}},
        "worker": {"classes": ["bulk"]},
        "engine": {"simulated_faults": True, "vllm": {"dtype": "float32", "list": [1, "x", {"y": False}]}},
    }
    built = settings.build(tree)
    assert settings.load(environ=settings.environment(built)) == built
    assert settings.environment(Settings()) == {}
