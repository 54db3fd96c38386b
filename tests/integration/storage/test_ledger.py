"""Cost on both bases and the identities of the ledger: 0 findings when sound, some for every tampering."""

from __future__ import annotations

import datetime as dt
import random
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from contract.errors import FatalError, InvalidRequest
from contract.money import NS_PER_HOUR, Tariff, Usage
from contract.settings import Cost
from contract.statuses import Status, Waste, WorkerState
from storage import cost, reports, statements
from storage.reconcile import CHECKS, reconcile
from storage.reports import GROUPS, Amount
from storage.store import Store
from tests.integration.storage.build import Worker, execute, now_ms, one, rows_of

COST = Cost(
    gpu_kind="cpu",
    gpu_usd_per_hour="2.37",
    input_usd_per_million="0.15",
    cached_input_usd_per_million="0.015",
    output_usd_per_million="0.60",
)
LINES = ("search", "ads", "")


class World:
    """A small world with everything in it: answers, retries, duplicates, resubmissions, a crash, idle time."""

    def __init__(self, store: Store, requests: int = 60, seed: int = 1) -> None:
        self.store = store
        self.random = random.Random(seed)
        store.seed_prices(COST)
        store.make_partitions()
        self.tariff = store.tariff("tiny", now_ms())
        self.workers = [Worker(store, f"w{number}") for number in range(3)]
        for number in range(requests):
            self.request(number)
        steady, slow, dead = self.workers
        steady.close(draining_ns=3)
        slow.beat(idle_ns=1_000_000_007)
        dead.beat(busy_ns=1_000, stalled_ns=77)  # in the engine when it died
        execute(store, "UPDATE workers SET provisioned_ns = provisioned_ns + 999 WHERE epoch = %s", dead.epoch)
        dead.fall_silent()
        assert store.reap(30) == [dead.epoch]

    def request(self, number: int) -> None:
        chance, worker = self.random, self.random.choice(self.workers)
        fields: dict[str, Any] = {
            "business_line": LINES[number % 3],
            "type": chance.choice(("chat", "summary")),
            "source": chance.choice(("web", "batch")),
        }
        usage = Usage.counted(chance.randint(1, 900), chance.randint(0, 900), chance.randint(1, 50))
        attempts = [
            worker.attempt(allocated_ns=chance.randint(1, 10**9), waste=waste)
            for waste in chance.sample([Waste.RETRY, Waste.ENGINE_DEATH, Waste.ABORTED], chance.randint(0, 2))
        ]
        status = chance.choice((*[Status.OK] * 6, Status.DEGRADED, Status.FAILED, Status.SHED, Status.CACHED))
        if status in (Status.OK, Status.DEGRADED):
            allocated_ns = chance.randint(1, 10**9)
            attempts.append(worker.attempt(allocated_ns=allocated_ns, usage=usage, tariff=self.tariff))
        settlement = worker.outcome(f"r{number}", status, usage=usage, attempts=attempts, **fields)
        self.store.settle([settlement])
        tell(worker, sum(attempt.allocated_ns for attempt in attempts))
        if status is Status.SHED or number % 7 == 0:
            self.again(worker, number, fields)

    def again(self, worker: Worker, number: int, fields: dict[str, Any]) -> None:
        """The same id on a new record: a duplicate or a resubmission."""
        late = worker.outcome(f"r{number}", tariff=self.tariff, **fields)
        self.store.settle([late])
        tell(worker, late.attempts[0].allocated_ns)


def tell(worker: Worker, allocated_ns: int) -> None:
    worker.beat(busy_ns=allocated_ns + 3, rounding_ns=3, idle_ns=11, starting_ns=5)


def test_a_sound_ledger_has_no_finding(store: Store) -> None:
    World(store)
    assert reconcile(store) == []


def test_an_empty_database_has_no_finding(store: Store) -> None:
    assert reconcile(store) == []


@pytest.mark.parametrize("group", GROUPS)
def test_all_lines_add_up_to_the_bill_exactly_whatever_the_grouping(store: Store, group: reports.Group) -> None:
    World(store)
    report = cost.cost_report(store, group)
    assert report.total == report.bill
    assert report.bill.ns == one(store, "SELECT sum(provisioned_ns)::bigint FROM workers")
    assert report.bill.usd == Fraction(report.bill.ns) * Fraction("2.37") / NS_PER_HOUR
    assert report.unpaid["lost"].ns == 999
    assert report.unpaid["in_flight"] == reports.NOTHING
    assert all(report.unpaid[name].ns > 0 for name in ("retry", "duplicate", "crash", "idle", "stalled", "rounding"))
    assert report.requests == one(store, "SELECT count(*) FROM results")
    charges = rows_of(store, "SELECT charge_usd FROM results")
    assert report.charge_usd == sum((Fraction(charge) for (charge,) in charges), Fraction(0))
    assert sum(line.output_tokens for line in report.lines) == one(store, "SELECT sum(output_tokens)::int FROM results")
    assert all(line.difference_usd == Fraction(line.charge_usd) - line.allocated_usd for line in report.lines)


def test_groups_are_told_apart(store: Store) -> None:
    World(store)
    by_line = {line.name: line for line in cost.cost_report(store, "business_line").lines}
    assert set(by_line) == {"search", "ads", ""}
    for name, line in by_line.items():
        paid = one(
            store,
            "SELECT sum(allocated_ns)::bigint FROM attempts WHERE waste IS NULL AND business_line = %s",
            name,
        )
        assert line.allocated_ns == paid
    (day,) = reports.cost_by(store, "day")
    assert day.name == dt.datetime.now(dt.UTC).date().isoformat()
    assert None in {line.name for line in reports.cost_by(store, "model")}, "refusals name no model"


def test_a_period_takes_what_was_settled_and_used_in_it_and_still_adds_up(store: Store) -> None:
    store.seed_prices(COST)
    worker = Worker(store, started_ms=1)
    hour = 3_600_000
    base = now_ms() // hour * hour
    for number in range(3):
        at_ms = base + number * hour
        attempt = worker.attempt(allocated_ns=100, ended_ms=at_ms, tariff=store.tariff(None, at_ms))
        store.settle([worker.outcome(f"{number}", attempts=[attempt], settled_ms=at_ms)])
        worker.beat(busy_ns=100, idle_ns=900, at_ms=at_ms)
    report = cost.cost_report(store, "type", base + hour, base + 2 * hour)
    assert [line.requests for line in report.lines] == [1]
    assert report.bill.ns == 1_000
    assert report.total == report.bill
    # The last moment of a period belongs to the next one: an attempt may end where its second is not told yet.
    assert cost.cost_report(store, "type", base + 2 * hour + 1).bill == reports.NOTHING


def test_time_is_priced_by_the_price_of_its_moment(store: Store) -> None:
    store.seed_prices(COST)
    worker = Worker(store, started_ms=1)
    change = now_ms() - 10_000
    moment = dt.datetime.fromtimestamp(change / 1000, dt.UTC)
    store.add_gpu_price(gpu_kind="cpu", valid_from=moment, usd_per_hour=Decimal("7"))
    for at_ms, ns in ((change - 1, 10), (change, 1_000)):
        attempt = worker.attempt(allocated_ns=ns, ended_ms=at_ms)
        store.settle([worker.outcome(f"{at_ms}", attempts=[attempt])])
        worker.beat(busy_ns=ns, at_ms=at_ms)
    report = cost.cost_report(store, "type")
    expected = (10 * Fraction("2.37") + 1_000 * 7) / NS_PER_HOUR
    assert report.lines[0].allocated_usd == expected
    assert report.bill == Amount(1_010, expected)
    assert report.total == report.bill


def test_time_without_a_price_is_an_error_not_free(store: Store) -> None:
    store.seed_prices(COST)
    Worker(store, gpu_kind="h100").beat(busy_ns=5)
    with pytest.raises(FatalError, match="h100"):
        cost.cost_report(store, "type")
    store.add_gpu_price(gpu_kind="h100", valid_from=dt.datetime(2020, 1, 1, tzinfo=dt.UTC), usd_per_hour=Decimal("3"))
    assert cost.cost_report(store, "type").bill.ns == 5


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


def test_prices_hold_until_the_next_and_are_not_rewritten(store: Store) -> None:
    store.seed_prices(COST)
    store.seed_prices(Cost(gpu_kind="cpu", gpu_usd_per_hour="99", output_usd_per_million="99"))
    first = store.tariff("tiny", now_ms())
    assert (first.input_usd, first.output_usd) == (Decimal("0.15"), Decimal("0.60"))
    march, april = (dt.datetime(2030, month, 1, tzinfo=dt.UTC) for month in (3, 4))

    def add(valid_from: dt.datetime, model: str | None, usd: str) -> int:
        return store.add_tariff(
            model=model,
            valid_from=valid_from,
            input_usd=Decimal(usd),
            cached_input_usd=Decimal(usd),
            output_usd=Decimal(usd),
        )

    general, special = add(april, None, "4"), add(march, "big", "3")

    def ids(model: str | None) -> list[int]:
        moments = (march, april)
        return [
            store.tariff(model, int(moment.timestamp() * 1000) + shift_ms).tariff_id
            for moment in moments
            for shift_ms in (-1, 0)
        ]

    assert ids("tiny") == [first.tariff_id, first.tariff_id, first.tariff_id, general]
    assert ids(None) == ids("tiny")
    assert ids("big") == [first.tariff_id, special, special, special]
    assert add(april, None, "4.0") == general, "the same again is harmless"
    with pytest.raises(InvalidRequest):
        add(april, None, "5")
    store.add_gpu_price(gpu_kind="cpu", valid_from=april, usd_per_hour=Decimal("1.5"))
    store.add_gpu_price(gpu_kind="cpu", valid_from=april, usd_per_hour=Decimal("1.50"))
    with pytest.raises(InvalidRequest):
        store.add_gpu_price(gpu_kind="cpu", valid_from=april, usd_per_hour=Decimal("1.6"))
    prices, tariffs = store.prices()
    assert [price["usd_per_hour"] for price in prices] == [Decimal("2.37"), Decimal("1.5")]
    assert len(tariffs) == 3


def test_without_any_tariff_nothing_is_quoted(store: Store) -> None:
    with pytest.raises(FatalError, match="tariff add"):
        store.tariff("tiny", now_ms())


def test_latencies_are_values_that_occurred_and_only_of_answers(store: Store) -> None:
    worker = Worker(store)
    base = now_ms()
    batch = [
        worker.outcome(
            f"{number}",
            appended_ms=base,
            settled_ms=base + 2_000,
            queue_ms=float(number),
            inference_ms=number * 2.0,
            latency_ms=number * 4.0,
            usage=Usage(30, 0, 10),
        )
        for number in range(1, 101)
    ]
    batch.append(worker.outcome("shed", Status.SHED, appended_ms=base, settled_ms=base + 2_000, queue_ms=9_999.0))
    batch.append(worker.outcome("long", Status.SHED, bucket="long", appended_ms=base, settled_ms=base))
    store.settle(batch)
    long, short = reports.latency_table(store)
    assert (short.class_name, short.bucket, short.count) == ("online", "short", 101)
    assert short.outcomes == {"ok": 100, "shed": 1}
    assert short.queue_ms == reports.Percentiles(50, 95, 99)
    assert short.inference_ms == reports.Percentiles(100, 190, 198)
    assert short.latency_ms == reports.Percentiles(200, 380, 396)
    assert (short.requests_per_s, short.tokens_per_s) == (50.5, 2_000)
    assert (long.count, long.queue_ms) == (1, None)
    assert reports.latency_table(store, until_ms=base) == []


def test_worker_time_totals_tell_each_state(store: Store) -> None:
    World(store)
    totals = reports.worker_time_totals(store)
    assert sum((totals.states[state].ns for state in WorkerState), 0) == totals.provisioned.ns
    assert totals.in_flight == reports.NOTHING


def test_charges_of_a_tariff_with_many_digits_stay_exact_through_the_database(store: Store) -> None:
    tariff = Tariff(1, Decimal("0.1234567890123456789"), Decimal("1E-12"), Decimal("123456789.987654321"))
    usage = Usage(123_456_789, 23_456_789, 987_654_321)
    worker = Worker(store)
    settlement = worker.outcome("a", usage=usage, tariff=tariff)
    (verdict,) = store.settle([settlement])
    assert one(store, "SELECT charge_usd FROM results") == tariff.charge_usd(usage) == verdict.result.charge_usd
    assert one(store, "SELECT charge_usd FROM attempts") == tariff.charge_usd(usage)
