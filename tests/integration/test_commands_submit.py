"""``headrace submit``, ``results`` and ``topics`` as processes against a real broker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from broker import topics
from contract import messages
from contract.settings import Settings
from contract.statuses import Status
from tests.integration.kit import Responder, build, text_of
from tests.integration.test_client import on_topic, publish_results

CASES = Path(__file__).parents[1] / "data" / "field-cases"


@pytest.fixture
def cli_settings(kafka: str, topic_prefix: str) -> Settings:
    settings = build(kafka, topic_prefix, "confluent")
    topics.ensure(settings)
    return settings


def run(
    settings: Settings, *arguments: str, stdin: bytes | None = None, **env: str
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "headrace", *arguments],
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        timeout=120,
        check=False,
        env=os.environ
        | {
            "HEADRACE_KAFKA__BOOTSTRAP_SERVERS": settings.kafka.bootstrap_servers,
            "HEADRACE_TOPICS__PREFIX": settings.topics.prefix,
            "HEADRACE_TOPICS__PARTITIONS": "3",
            "HEADRACE_TOPICS__REPLY_PARTITIONS": "3",
            "HEADRACE_TOPICS__MAX_MESSAGE_BYTES": "100000",
        }
        | env,
    )


def lines_of(output: bytes) -> list[Any]:
    return [orjson.loads(line) for line in output.splitlines()]


def requests_on(settings: Settings, class_name: str = "online", bucket: str = "short") -> list[messages.Request]:
    found = on_topic(settings, settings.names.request("default", class_name, bucket))
    return [messages.parse_request(record.value).request for record in found]


def test_text_is_submitted_with_its_options(cli_settings: Settings) -> None:
    done = run(cli_settings, "submit", "hello", "--class", "offline", "--max-tokens", "7", "--model", "tiny-llama")
    assert done.returncode == 0, done.stderr
    (ticket,) = lines_of(done.stdout)
    (request,) = requests_on(cli_settings, "offline")
    assert (request.id, request.input, request.max_tokens, request.model) == (ticket["id"], "hello", 7, "tiny-llama")
    assert b"1 submitted, 0 refused" in done.stderr.splitlines()[-1]


def test_file_goes_through_and_bad_lines_are_named_by_number(cli_settings: Settings, tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_bytes(
        b'\xef\xbb\xbf{"id":"1","input":"a","max_tokens":1}\r\n'
        b"\r\n"
        b'{"id":"3","input":"b\xe2\x80\xa8c","max_tokens":2}\n'
        b"{broken\n"
        b'{"id":"5","input":"' + b"x" * 200_000 + b'"}\n'
        b'{"id":"6","input":1}\n'
        b'{"id":"7","input":"last"}'
    )
    done = run(cli_settings, "submit", "-f", str(file), "--max-tokens", "9")
    assert done.returncode == 1
    assert [ticket["id"] for ticket in lines_of(done.stdout)] == ["1", "3", "7"]
    told = done.stderr.decode().splitlines()
    assert sorted(line.split(":")[0] for line in told[:-1]) == ["line 4", "line 5", "line 6"]
    assert told[-1].startswith("3 submitted, 3 refused; ")
    assert {(r.id, r.input, r.max_tokens) for r in requests_on(cli_settings)} == {
        ("1", "a", 1),
        ("3", "b\u2028c", 2),
        ("7", "last", 9),
    }


def test_standard_input_is_read_and_results_are_waited_for_in_order(cli_settings: Settings) -> None:
    stdin = b"".join(orjson.dumps({"id": str(n), "input": f"text {n}"}) + b"\n" for n in range(300))
    with Responder(cli_settings):
        done = run(cli_settings, "submit", "--wait", "--timeout", "60", stdin=stdin)
    assert done.returncode == 0, done.stderr
    results = [messages.parse_result(line) for line in done.stdout.splitlines()]
    assert [result.id for result in results] == [str(n) for n in range(300)]
    assert text_of(results[7]) == "7 txet"
    assert b"300 submitted, 0 refused, 300 ok" in done.stderr.splitlines()[-1]


def test_wait_ends_with_what_is_missing_and_status_1(cli_settings: Settings) -> None:
    def answers(request: messages.Request, result: messages.Result) -> messages.Result | None:
        if request.id == "silent":
            return None
        result.status = Status.FAILED if request.id == "failing" else result.status
        return result

    stdin = b"".join(orjson.dumps({"id": id, "input": "x"}) + b"\n" for id in ("silent", "failing", "fine"))
    with Responder(cli_settings, answers):
        done = run(cli_settings, "submit", "--wait", "--timeout", "3", stdin=stdin)
    assert done.returncode == 1
    assert [result["id"] for result in lines_of(done.stdout)] == ["failing", "fine"]
    assert b"no result of request silent" in done.stderr
    assert b"3 submitted, 0 refused, 1 failed, 1 ok, 1 without result" in done.stderr.splitlines()[-1]


def test_trouble_is_one_line_and_status_2(cli_settings: Settings) -> None:
    done = run(cli_settings, "submit", "x", HEADRACE_TOPICS__PREFIX="nowhere")
    assert done.returncode == 2
    assert done.stdout == b""
    assert b"nowhere.default.online" in done.stderr
    assert b"headrace topics create" in done.stderr
    assert b"Traceback" not in done.stderr
    away = run(
        cli_settings,
        "submit",
        "x",
        HEADRACE_KAFKA__BOOTSTRAP_SERVERS="127.0.0.1:9",
        HEADRACE_KAFKA__REQUEST_TIMEOUT_S="1",
    )
    assert away.returncode == 2
    assert b"Error: no answer from 127.0.0.1:9 within 1 s" in away.stderr


def test_results_are_json_lines_until_the_end(cli_settings: Settings) -> None:
    publish_results(cli_settings, ["a", "b"])
    done = run(cli_settings, "results")
    assert done.returncode == 0, done.stderr
    assert [messages.parse_result(line).id for line in done.stdout.splitlines()] == ["a", "b"]
    group = f"{cli_settings.topics.prefix}-g"
    first = run(cli_settings, "results", "--group", group, "--since", "earliest")
    again = run(cli_settings, "results", "--group", group, "--since", "earliest")
    assert len(first.stdout.splitlines()) == 2
    assert again.stdout == b""


def test_topics_are_created_and_checked(kafka: str, topic_prefix: str) -> None:
    settings = build(kafka, topic_prefix, "confluent")
    before = run(settings, "topics", "check")
    assert before.returncode == 1
    assert b"headrace topics create" in before.stdout
    created = run(settings, "topics", "create")
    assert created.returncode == 0, created.stderr
    assert b"10 created, 0 there already" in created.stdout
    assert run(settings, "topics", "check").returncode == 0
    more = run(settings, "topics", "check", HEADRACE_TOPICS__PARTITIONS="5")
    assert more.returncode == 1
    assert b"--partitions 5" in more.stdout
