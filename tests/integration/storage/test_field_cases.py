"""Faults that others reported from the field, on the way into the database and out of it."""

from __future__ import annotations

import threading
from decimal import Decimal
from typing import Any

import pytest

from contract.messages import dump_output, parse_result
from contract.money import Tariff, Usage, plain
from contract.settings import Cost
from contract.statuses import Status
from storage import cost
from storage.reconcile import reconcile
from storage.rows import ResultRow
from storage.store import Store
from tests.data import field_case
from tests.integration.storage.build import Call, Worker, now_ms, one, rows_of

B14: list[dict[str, Any]] = field_case("B14-model-outputs.json")
B15: dict[str, list[str]] = field_case("B15-upsert-orders.json")
B16: dict[str, Any] = field_case("B16-money.json")
B21: dict[str, Any] = field_case("B21-usage.json")

# The decision: what Postgres or UTF-8 cannot hold becomes U+FFFD and the row is marked; all else is kept as it is.
REPLACED: dict[str, Any] = {
    "nul in the middle": "a\ufffdb",
    "only nul": "\ufffd",
    "high surrogate alone": "cut \ufffd",
    "low surrogate alone": "\ufffd cut",
    "pair in the wrong order": "\ufffd\ufffd",
    "nul in an object key": {"k\ufffd": 1},
}


def output_of(row: ResultRow) -> Any:
    assert row.output is not None
    result = parse_result(row.to_result())
    assert result.output is not None
    return result.output["choices"][0]["value"]


@pytest.mark.parametrize("case", B14, ids=[case["name"] for case in B14])
def test_b14_an_answer_that_postgres_cannot_hold_does_not_fail_its_batch(store: Store, case: dict[str, Any]) -> None:
    value = case["value"]
    worker = Worker(store)
    batch = [worker.outcome(f"{case['name']} {place}") for place in range(50)]
    output, altered = dump_output({"choices": [{"index": 0, "value": value}]})
    batch[25].result.output, batch[25].result.altered = output, altered
    if isinstance(value, str):
        # The same text as a prompt's labels: everything a publisher can name.
        row = batch[30].result
        row.business_line = row.type = row.custom_id = row.error_message = value
        row.tags = {value: value}
    verdicts = store.settle(batch)
    assert all(verdict.won and verdict.result.status is Status.OK for verdict in verdicts)
    stored = store.stored_results([settlement.result.key for settlement in batch])
    assert len(stored) == 50
    expected = REPLACED.get(case["name"], value)
    answer, labelled = stored[batch[25].result.key], stored[batch[30].result.key]
    assert output_of(answer) == expected
    assert answer.altered is (case["name"] in REPLACED)
    if isinstance(value, str):
        assert (labelled.business_line, labelled.type, labelled.custom_id) == (expected, expected, expected)
        assert labelled.tags == {expected: expected}
        assert labelled.altered is (case["name"] in REPLACED)
    assert not any(row.altered for key, row in stored.items() if key not in (answer.key, labelled.key))


def test_b15_two_writers_in_opposite_orders_lose_nothing_and_see_no_error(store: Store) -> None:
    rounds = 200
    start = threading.Barrier(2)

    def write(name: str, order: list[str]) -> int:
        own = Store(store.postgres)
        worker = Worker(own, name)
        won = 0
        for number in range(rounds):
            batch = [worker.outcome(f"{number}-{id}", business_line=id) for id in order]
            start.wait(60)
            verdicts = own.settle(batch)
            won += sum(verdict.won for verdict in verdicts)
            assert [verdict.result.business_line for verdict in verdicts] == order
        own.close()
        return won

    calls = [Call(lambda name=name: write(name, B15[name])) for name in ("writer_a", "writer_b")]  # type: ignore[misc]
    won = [call.result(200) for call in calls]
    assert sum(won) == rounds * 40
    assert min(won) > 0, "both were at work at the same time"
    assert rows_of(store, "SELECT business_line, count(*) FROM results GROUP BY 1 ORDER BY 1") == [
        (id, rounds) for id in B15["writer_a"]
    ]
    assert one(store, "SELECT count(*) FROM attempts WHERE waste IS NULL") == rounds * 40
    assert one(store, "SELECT count(*) FROM attempts WHERE waste = 'duplicate'") == rounds * 40


def test_b15_of_a_key_twice_in_one_batch_the_first_answer_wins(store: Store) -> None:
    worker = Worker(store)
    ids = B15["one_batch_same_key_twice"]
    verdicts = store.settle([worker.outcome(id, custom_id=f"{place}") for place, id in enumerate(ids)])
    assert [verdict.won for verdict in verdicts] == [True, True, False, True]
    assert verdicts[2].result.custom_id == "0"
    assert one(store, "SELECT count(*) FROM results") == 3


@pytest.mark.parametrize("case", B16["cases"], ids=[case["name"] for case in B16["cases"]])
def test_b16_sums_of_charges_are_exact(store: Store, case: dict[str, Any]) -> None:
    prices = B16["price_per_million"]
    tariff = tariff_of(store, prices["input"], "0", prices["output"])
    usage = Usage(case["input_tokens_each"], 0, case["output_tokens_each"])
    worker = Worker(store)
    # Of the month's three million equal rows a thousand go in: the rest would only repeat them.
    rows = min(case["requests"], 1_000)
    store.settle([worker.outcome(f"{number}", usage=usage, tariff=tariff) for number in range(rows)])
    total = one(store, "SELECT sum(charge_usd) FROM results") * (case["requests"] // rows)
    assert total == Decimal(case["exact_total"])
    if "exact_each" in case:
        assert rows_of(store, "SELECT DISTINCT charge_usd FROM results") == [(Decimal(case["exact_each"]),)]
    # As the API says it: a decimal string, no exponent, no digit lost.
    assert Decimal(plain(total)) == total
    assert "E" not in plain(total)
    report = cost.cost_report(store, "business_line").to_json()
    assert Decimal(report["charge_usd"]) * (case["requests"] // rows) == Decimal(case["exact_total"])


@pytest.mark.parametrize("case", B21["cases"], ids=[case["name"] for case in B21["cases"]])
def test_b21_cached_tokens_are_charged_once_at_their_own_price(store: Store, case: dict[str, Any]) -> None:
    prices = B21["price_per_million"]
    tariff = tariff_of(store, prices["input"], prices["cached_input"], prices["output"])
    usage = Usage.counted(case["prompt"], case["cached"], case["completion"])
    worker = Worker(store)
    (verdict,) = store.settle([worker.outcome("a", usage=usage, tariff=tariff)])
    row = store.stored_results([verdict.result.key])[verdict.result.key]
    assert row.charge_usd == Decimal(case["exact_cost"])
    assert (row.prompt_tokens, row.output_tokens) == (case["prompt"], case["completion"])
    assert row.cached_tokens == min(case["cached"] or 0, case["prompt"])
    assert row.usage_contradictory is (case["name"] == "engine reports more cached than prompt")
    worker.close(busy_ns=1_000_000)
    assert reconcile(store) == []


def test_b21_an_answer_from_our_own_cache_is_free(store: Store) -> None:
    tariff = tariff_of(store, "1", "1", "1")
    assert tariff.charge_usd(Usage(10, 0, 5)) > 0
    (verdict,) = store.settle([Worker(store).outcome("a", Status.CACHED, prompt_tokens=10, output_tokens=5)])
    assert verdict.result.charge_usd == 0
    assert reconcile(store) == []


def tariff_of(store: Store, input_usd: str, cached_input_usd: str, output_usd: str) -> Tariff:
    """A tariff in the database, read back from it. (A GPU price beside it, so that reports can be made.)"""
    store.seed_prices(
        Cost(
            input_usd_per_million=input_usd,
            cached_input_usd_per_million=cached_input_usd,
            output_usd_per_million=output_usd,
        )
    )
    return store.tariff(None, now_ms())
