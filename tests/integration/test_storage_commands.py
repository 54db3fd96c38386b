"""The commands that read and keep the database, as a person calls them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from contract.settings import Postgres
from contract.statuses import Status, Waste
from headrace.cli import main
from storage.store import Store
from tests.integration.storage.build import Worker, execute, now_ms, one


@pytest.fixture
def store(postgres_url: str) -> Iterator[Store]:
    one_store = Store(Postgres(url=postgres_url))
    yield one_store
    one_store.close()


class Headrace:
    """The command line with its settings in the environment."""

    def __init__(self, url: str) -> None:
        self._environment = {"HEADRACE_POSTGRES__URL": url}

    def __call__(self, *arguments: str, exit_code: int = 0) -> Result:
        result = CliRunner().invoke(main, arguments, env=self._environment)
        assert result.exit_code == exit_code, result.output
        return result


@pytest.fixture
def headrace(postgres_url: str) -> Headrace:
    return Headrace(postgres_url)


@pytest.fixture
def world(store: Store, headrace: Headrace) -> Worker:
    """A migrated database with one retried answer, one refusal, and a worker that has stopped."""
    headrace("migrate")
    worker = Worker(store)
    tariff = store.tariff("tiny", now_ms())
    attempts = [worker.attempt(waste=Waste.RETRY), worker.attempt(tariff=tariff)]
    store.settle(
        [
            worker.outcome("a", attempts=attempts, business_line="search", custom_id="one\ntwo\x1b[31m"),
            worker.outcome("b", Status.SHED, source="other", business_line="ads"),
        ]
    )
    worker.close(busy_ns=2_000_000, idle_ns=5_000_000)
    return worker


def lines(result: Result) -> list[dict[str, object]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_migrate_makes_partitions_and_first_prices_and_twice_is_harmless(headrace: Headrace, store: Store) -> None:
    for _ in range(2):
        assert "up to date" in headrace("migrate").stdout
    assert one(store, "SELECT count(*) FROM pg_inherits WHERE inhparent = 'results'::regclass") == 4
    assert one(store, "SELECT count(*) FROM tariffs") == 1


def test_sql_prints_a_table_or_json_lines(headrace: Headrace, world: Worker) -> None:
    statement = "SELECT id, status, charge_usd, tags, day FROM results ORDER BY id"
    text = headrace("sql", statement).stdout.splitlines()
    assert text[0].split() == ["id", "status", "charge_usd", "tags", "day"]
    assert text[2].split()[:2] == ["a", "ok"]
    first, second = lines(headrace("sql", statement, "--json"))
    assert (first["id"], first["charge_usd"], second["tags"]) == ("a", "0.00000423", None)
    listed = headrace("sql").stdout
    assert {"results", "attempts", "settled", "workers"} <= {line.split()[0] for line in listed.splitlines()}
    assert "results_2" not in listed, "partitions are not listed"


def test_sql_shows_control_characters_instead_of_obeying_them(headrace: Headrace, world: Worker) -> None:
    shown = headrace("sql", "SELECT custom_id FROM results WHERE id = 'a'").stdout
    assert "one\\x0atwo\\x1b[31m" in shown


def test_sql_stops_at_max_rows_and_says_so(headrace: Headrace, world: Worker) -> None:
    result = headrace("sql", "--max-rows", "3", "--json", "SELECT generate_series(1, 1000000000) AS n")
    assert lines(result) == [{"n": 1}, {"n": 2}, {"n": 3}]
    assert "--max-rows" in result.stderr


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM results",
        "SELECT 1; DELETE FROM results",
        "COMMIT; DELETE FROM results",
        "SELEC 1",
        "SELECT * FROM nowhere",
        "SELECT 1/0",
    ],
)
def test_sql_changes_nothing_and_says_what_is_wrong_in_one_line(
    headrace: Headrace, store: Store, world: Worker, statement: str
) -> None:
    result = headrace("sql", statement, exit_code=2)
    assert len(result.stderr.strip().splitlines()) == 1
    assert one(store, "SELECT count(*) FROM results") == 2


def test_sql_gives_up_at_its_deadline(headrace: Headrace, world: Worker) -> None:
    assert "Postgres" in headrace("sql", "--timeout-s", "0.3", "SELECT pg_sleep(30)", exit_code=2).stderr


def test_cost_shows_both_bases_down_to_the_bill(headrace: Headrace, world: Worker) -> None:
    report = lines(headrace("cost", "--json"))[0]
    assert report["total"] == report["bill"] == {"ns": 7_000_000, "usd": "0.000003888889"}
    assert report["charge_usd"] == "0.00000423"
    by_name = {line["name"]: line for line in report["lines"]}  # type: ignore[attr-defined]
    assert by_name["search"]["allocated_ns"] == 1_000_000
    assert by_name["ads"]["charge_usd"] == "0"
    text = headrace("cost", "--by", "type").stdout
    for word in ("charge_usd", "allocated_usd", "difference_usd", "retry", "idle", "lost", "rounding", "bill"):
        assert word in text
    assert lines(headrace("cost", "--json", "--until", "2020-01-01"))[0]["lines"] == []
    headrace("cost", "--since", "yesterday", exit_code=2)


def test_cost_of_an_empty_database_is_a_table_of_zeros(headrace: Headrace, store: Store) -> None:
    assert "all tenants" in headrace("cost").stdout


def test_tariffs_and_prices_are_added_and_listed(headrace: Headrace, world: Worker) -> None:
    tariff = ("--from", "2031-01-01", "--input", "1.25", "--cached-input", "0.5", "--output", "10")
    headrace("cost", "tariff", "add", *tariff, "--model", "big")
    headrace(
        "cost", "price", "add", "--gpu-kind", "h100", "--from", "2031-01-01T06:00:00+02:00", "--usd-per-hour", "3.5"
    )
    listed = headrace("cost", "list").stdout
    for word in ("big", "1.25", "h100", "3.5", "2031-01-01 04:00:00"):
        assert word in listed
    other = ("--from", "2031-01-01", "--input", "2", "--cached-input", "0.5", "--output", "10", "--model", "big")
    assert "another tariff" in headrace("cost", "tariff", "add", *other, exit_code=2).stderr
    headrace(
        "cost",
        "tariff",
        "add",
        "--from",
        "2031-01-01",
        "--input",
        "-1",
        "--cached-input",
        "0",
        "--output",
        "0",
        exit_code=2,
    )


def test_reconcile_is_zero_and_then_not(headrace: Headrace, store: Store, world: Worker) -> None:
    assert "0 findings" in headrace("reconcile").stdout
    dead = Worker(store, "dead")
    dead.beat(busy_ns=5)
    dead.fall_silent()
    assert f"worker epoch {dead.epoch} is dead" in headrace("reconcile").stdout
    execute(store, "DELETE FROM worker_time WHERE worker_epoch = %s", dead.epoch)
    text = headrace("reconcile", exit_code=1).stdout
    assert f"provisioned_is_all_states: worker epoch {dead.epoch}" in text
    found = lines(headrace("reconcile", "--json", exit_code=1))
    assert {each["check"] for each in found} == {"provisioned_is_all_states", "busy_is_shared_out"}


def test_show_tells_everything_about_one_request(headrace: Headrace, world: Worker) -> None:
    text = headrace("show", "a").stdout
    for word in ("business_line", "search", "retry", "0.00000423", "appended_at", "one\\x0atwo"):
        assert word in text
    (shown,) = lines(headrace("show", "a", "--json"))
    assert shown["output"] == {"choices": [{"index": 0, "text": "hello"}]}
    assert [attempt["waste"] for attempt in shown["attempts"]] == ["retry", None]  # type: ignore[attr-defined]
    assert lines(headrace("show", str(shown["key"]), "--json")) == [shown]
    headrace("show", "b", "--source", "other")
    assert "no result" in headrace("show", "b", "--source", "tests", exit_code=1).stderr
    headrace("show", "nobody", exit_code=1)


@pytest.mark.parametrize("command", [["sql"], ["cost"], ["reconcile"], ["show", "a"], ["migrate"]])
def test_a_database_that_is_away_is_one_line_and_status_2(command: list[str]) -> None:
    away = Headrace("postgresql://postgres@/headrace?host=/nonexistent")
    result = away(*command, exit_code=2)
    assert len(result.stderr.strip().splitlines()) == 1
    assert "Postgres" in result.stderr
