"""Cost on both bases, prices and reports, through a real database."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from fractions import Fraction

import pytest

from contract.errors import FatalError, InvalidRequest
from contract.money import NS_PER_HOUR, Tariff, Usage
from contract.settings import Cost
from contract.statuses import Status, WorkerState
from storage import cost, reports
from storage.reports import GROUPS, Amount
from storage.store import Store
from tests.integration.storage.build import Worker, now_ms, one, rows_of
from tests.integration.storage.world import COST, World


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
