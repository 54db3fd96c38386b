"""The identities of the ledger: no finding when sound, some for every tampering."""

from __future__ import annotations

import random

import pytest

from contract.money import Usage
from contract.statuses import Waste
from storage import cost, statements
from storage.reconcile import CHECKS, reconcile
from storage.store import Store
from tests.integration.storage.build import Worker, execute, now_ms, rows_of
from tests.integration.storage.world import COST, World


def test_a_sound_ledger_has_no_finding(store: Store) -> None:
    World(store)
    assert reconcile(store) == []


def test_an_empty_database_has_no_finding(store: Store) -> None:
    assert reconcile(store) == []


def test_an_attempt_settled_before_its_time_is_told_is_no_finding_but_too_much_is(store: Store) -> None:
    store.seed_prices(COST)
    worker = Worker(store)
    worker.beat(busy_ns=10)
    store.settle([worker.outcome("a", attempts=[worker.attempt(allocated_ns=500_000_000)])])
    assert reconcile(store) == []
    report = cost.cost_report(store, "type")
    assert report.unpaid["in_flight"].ns == 10 - 500_000_000
    assert report.total == report.bill
    store.settle([worker.outcome("b", attempts=[worker.attempt(allocated_ns=3_600 * 10**9)])])
    assert [finding.check for finding in reconcile(store)] == ["busy_is_shared_out"]


COLUMNS = ", ".join(statements.RESULT_COLUMNS[1:])
LAST_ROW = (
    "WHERE (worker_epoch, seq) = (SELECT worker_epoch, max(seq) FROM worker_time WHERE worker_epoch = 1 GROUP BY 1)"
)
PAID = "WHERE (worker_epoch, seq) = (SELECT worker_epoch, seq FROM attempts WHERE charge_usd > 0 ORDER BY 1, 2 LIMIT 1)"
WASTED = "WHERE (worker_epoch, seq) = (SELECT worker_epoch, seq FROM attempts WHERE waste = 'retry' LIMIT 1)"
ANSWER = (
    "WHERE (key, generation) ="
    " (SELECT key, generation FROM results WHERE status = 'ok' AND charge_usd > 0 ORDER BY key, generation LIMIT 1)"
)

TAMPERINGS: list[tuple[str, str, set[str]]] = [
    ("a worker's last second hidden", f"DELETE FROM worker_time {LAST_ROW}", {"provisioned_is_all_states"}),
    (
        "a row in the middle hidden, provisioned time made to fit",
        "WITH gone AS (DELETE FROM worker_time WHERE worker_epoch = 1 AND seq = 2"
        " RETURNING starting_ns + idle_ns + busy_ns AS ns)"
        " UPDATE workers SET provisioned_ns = provisioned_ns - (SELECT ns FROM gone) WHERE epoch = 1",
        {"time_rows_are_gapless", "busy_is_shared_out"},
    ),
    (
        "idle time told as stalled twice",
        f"UPDATE worker_time SET stalled_ns = stalled_ns + 1 {LAST_ROW}",
        {"provisioned_is_all_states"},
    ),
    (
        "a dead worker's busy time told as idle",
        "UPDATE worker_time SET busy_ns = busy_ns - 1, idle_ns = idle_ns + 1 WHERE worker_epoch = 3 AND seq = 1",
        {"busy_is_shared_out"},
    ),
    ("lost time forgotten", "UPDATE workers SET lost_ns = 0 WHERE epoch = 3", {"provisioned_is_all_states"}),
    ("a crash line removed", "DELETE FROM attempts WHERE waste = 'crash'", {"busy_is_shared_out"}),
    ("rounding forgotten", "UPDATE worker_time SET rounding_ns = 0 WHERE worker_epoch = 1", {"busy_is_shared_out"}),
    (
        "a nanosecond more allocated",
        "UPDATE attempts SET allocated_ns = allocated_ns + 1 WHERE worker_epoch = 1 AND seq = 1",
        {"busy_is_shared_out"},
    ),
    (
        "an attempt's charge doubled",
        f"UPDATE attempts SET charge_usd = charge_usd * 2 {PAID}",
        {"charge_is_tariff_times_tokens", "result_is_charged_its_attempts", "business_line_totals_agree"},
    ),
    (
        "a result's charge rounded to six places",
        f"UPDATE results SET charge_usd = round(charge_usd, 6) + 0.000001 {ANSWER}",
        {"result_is_charged_its_attempts", "business_line_totals_agree"},
    ),
    (
        "charge moved from one business line to another",
        "UPDATE results SET business_line = 'search' WHERE key ="
        " (SELECT key FROM results WHERE status = 'ok' AND business_line = 'ads' AND charge_usd > 0 LIMIT 1)",
        {"business_line_totals_agree", "attempt_agrees_with_its_result"},
    ),
    (
        "tokens of an answer changed",
        f"UPDATE results SET output_tokens = output_tokens + 1 {ANSWER}",
        {"tokens_are_the_attempts"},
    ),
    (
        "tokens of an answer and its attempt changed",
        f"WITH a AS (UPDATE results SET output_tokens = 999 {ANSWER} RETURNING day, key, generation)"
        " UPDATE attempts SET output_tokens = 999 FROM a WHERE waste IS NULL"
        " AND (result_day, attempts.key, attempts.generation) = (a.day, a.key, a.generation)",
        {"charge_is_tariff_times_tokens"},
    ),
    (
        "a tariff rewritten after the fact",
        "UPDATE tariffs SET output_usd = output_usd * 2",
        {"charge_is_tariff_times_tokens"},
    ),
    (
        "waste charged",
        "ALTER TABLE attempts DROP CONSTRAINT attempts_waste_is_free_check;"
        f" UPDATE attempts SET charge_usd = 1 {WASTED}",
        {"waste_is_free", "result_is_charged_its_attempts", "business_line_totals_agree"},
    ),
    (
        "an answer's attempt declared waste",
        f"UPDATE attempts SET waste = 'retry', charge_usd = 0 {PAID}",
        {"one_attempt_answers", "result_is_charged_its_attempts", "business_line_totals_agree"},
    ),
    (
        "an attempt deleted",
        f"DELETE FROM attempts {PAID}",
        {
            "busy_is_shared_out",
            "one_attempt_answers",
            "result_is_charged_its_attempts",
            "business_line_totals_agree",
        },
    ),
    (
        "a result deleted",
        f"DELETE FROM results {ANSWER}",
        {"settled_key_has_its_result", "attempt_agrees_with_its_result", "business_line_totals_agree"},
    ),
    ("a settled key deleted", f"DELETE FROM settled {ANSWER}", {"result_has_its_settled_key"}),
    (
        "an outcome changed",
        f"UPDATE results SET status = 'failed' {ANSWER}",
        {"settled_key_has_its_result"},
    ),
    (
        "a second visible result",
        f"INSERT INTO results (day, {COLUMNS}) SELECT day + 1, {COLUMNS} FROM results {ANSWER}",
        {
            "result_has_its_settled_key",
            "one_attempt_answers",
            "result_is_charged_its_attempts",
            "business_line_totals_agree",
        },
    ),
    (
        "a result of a generation that was never settled",
        f"UPDATE results SET generation = 9 {ANSWER}",
        {
            "settled_key_has_its_result",
            "result_has_its_settled_key",
            "attempt_agrees_with_its_result",
            "one_attempt_answers",
            "result_is_charged_its_attempts",
        },
    ),
    (
        "a worker forgotten",
        "DELETE FROM workers WHERE epoch = 1",
        {"time_has_its_worker"},
    ),
    (
        "time taken back",
        "UPDATE worker_time SET busy_ns = busy_ns - 10000000000, idle_ns = idle_ns + 10000000000"
        " WHERE worker_epoch = 3 AND seq = 1",
        {"nothing_is_negative", "busy_is_shared_out"},
    ),
]


@pytest.mark.parametrize(
    ("statement", "checks"), [each[1:] for each in TAMPERINGS], ids=[each[0] for each in TAMPERINGS]
)
def test_tampering_is_found(store: Store, statement: str, checks: set[str]) -> None:
    World(store, requests=30)
    for each in statement.split(";"):
        execute(store, each)
    findings = reconcile(store)
    assert {finding.check for finding in findings} == checks
    assert all(str(finding) for finding in findings)


def test_waste_declared_an_answer_charges_twice_and_is_found(store: Store) -> None:
    store.seed_prices(COST)
    worker = Worker(store)
    tariff = store.tariff(None, now_ms())
    attempts = [worker.attempt(waste=Waste.RETRY), worker.attempt(tariff=tariff)]
    store.settle([worker.outcome("a", attempts=attempts)])
    worker.beat(busy_ns=2 * attempts[0].allocated_ns)
    assert reconcile(store) == []
    execute(store, "UPDATE attempts SET waste = NULL WHERE waste IS NOT NULL")
    assert [finding.check for finding in reconcile(store)] == ["one_attempt_answers"]


def test_every_check_can_find_something() -> None:
    found = set().union(*(checks for _, _, checks in TAMPERINGS))
    assert found == set(CHECKS)


def test_findings_of_one_check_are_bounded(store: Store) -> None:
    World(store)
    execute(store, "UPDATE results SET charge_usd = charge_usd + 1")
    by_check = [finding.check for finding in reconcile(store)]
    assert by_check.count("result_is_charged_its_attempts") == 20


def test_what_retention_took_is_no_finding(store: Store) -> None:
    store.seed_prices(COST)
    day_ms = 86_400_000
    old = now_ms() - (store.postgres.results_days + 1) * day_ms
    worker = Worker(store, started_ms=old)
    tariff = store.tariff(None, now_ms())
    # Appended before the oldest kept day, answered after it; and another that is gone altogether.
    boundary = old + day_ms + 1
    late = worker.outcome("late", attempts=[worker.attempt(ended_ms=boundary + 60_000, tariff=tariff)], appended_ms=old)
    gone = worker.outcome("gone", attempts=[worker.attempt(ended_ms=old, tariff=tariff)], appended_ms=old)
    kept = worker.outcome("kept", attempts=[worker.attempt(tariff=tariff)])
    store.settle([late, gone, kept])
    worker.close(busy_ns=3_000_000)
    assert reconcile(store) == []
    assert store.drop_old()
    assert rows_of(store, "SELECT id FROM results") == [("kept",)]
    assert reconcile(store) == []


def test_ten_thousand_requests_reconcile_to_the_nanosecond_and_the_last_digit(store: Store) -> None:
    store.seed_prices(COST)
    tariff = store.tariff("tiny", now_ms())
    chance = random.Random(7)
    workers = [Worker(store, f"w{number}") for number in range(4)]
    for batch_number in range(50):
        worker = workers[batch_number % 4]
        batch, busy_ns = [], 0
        for number in range(200):
            usage = Usage.counted(chance.randint(1, 2_000), chance.randint(0, 2_000), chance.randint(1, 500))
            attempts = [worker.attempt(allocated_ns=chance.randint(1, 10**8), usage=usage, tariff=tariff)]
            if chance.random() < 0.1:
                attempts.insert(0, worker.attempt(allocated_ns=chance.randint(1, 10**7), waste=Waste.RETRY))
            # One in ten was answered by another worker before.
            place = batch_number * 200 + number - (chance.randint(200, 800) if chance.random() < 0.1 else 0)
            batch.append(
                worker.outcome(f"id-{max(place, 0)}", usage=usage, attempts=attempts, business_line=str(place % 5))
            )
            busy_ns += sum(attempt.allocated_ns for attempt in attempts)
        store.settle(batch)
        worker.beat(busy_ns=busy_ns + 17, rounding_ns=17, idle_ns=chance.randint(0, 10**6))
    for worker in workers[1:]:
        worker.close()
    workers[0].fall_silent()
    store.reap(30)
    assert reconcile(store) == []
    report = cost.cost_report(store, "business_line")
    assert report.total == report.bill
    assert report.unpaid["duplicate"].ns > 0
