"""The demo's load and its tally."""

from __future__ import annotations

import statistics

import msgspec

from contract.messages import Request, Result, check_request
from contract.statuses import Status
from headrace.demo import report
from headrace.demo.load import OFFLINE, ONLINE, Load
from headrace.demo.tally import Tally


def test_load_is_valid_varied_and_the_same_for_the_same_source() -> None:
    first, second = Load("run"), Load("run")
    made: list[Request] = []
    for class_name in (ONLINE, OFFLINE):
        for _ in range(500):
            request = first.request(class_name)
            assert request == second.request(class_name)
            check_request(request)
            made.append(msgspec.convert(msgspec.to_builtins(request), Request))
    assert len({request.id for request in made}) == 1_000
    assert len({request.business_line for request in made}) == 5
    lengths = [request.max_tokens or 0 for request in made]
    assert min(lengths) <= 16
    assert max(lengths) >= 200


def test_arrivals_have_the_mean_rate_and_are_not_even() -> None:
    gaps = Load("run").gaps_s(8.0)
    drawn = [next(gaps) for _ in range(4_000)]
    assert 0.9 / 8 < statistics.mean(drawn) < 1.1 / 8
    assert statistics.stdev(drawn) > 0.8 / 8


def result(key: str, **fields: object) -> Result:
    return msgspec.convert({"key": key, "status": "ok", "id": "online-000001", **fields}, Result)


def test_same_result_twice_counts_once_and_another_one_is_a_conflict() -> None:
    tally = Tally()
    tally.acknowledged(ONLINE, "k1", "online-000001")
    tally.acknowledged(OFFLINE, "k2", "offline-000001")
    assert tally.open == 2
    for _ in range(2):
        tally.settled(result("k1", cost_usd="0.1"), 1.0)
    assert (tally.open, tally.conflicting) == (1, set())
    tally.settled(result("k1", cost_usd="0.2"), 2.0)
    assert tally.conflicting == {"k1"}
    assert tally.counts[ONLINE].settled == 1


def test_refusals_settle_but_are_no_answers_for_the_live_figures() -> None:
    tally = Tally()
    for number, status in enumerate(Status):
        tally.settled(result(f"k{number}", status=status), 1.0)
    assert tally.counts[ONLINE].settled == len(Status)
    assert len(tally.recent) == 3


def test_result_read_before_its_acknowledgement_is_no_negative_lag() -> None:
    tally = Tally()
    tally.settled(result("k"), 1.0)
    assert tally.open == 0


def test_window_sizes_come_from_the_metrics_page() -> None:
    from prometheus_client import generate_latest

    from contract.metrics import Metrics

    metrics = Metrics({"class": [ONLINE, OFFLINE]})
    for size in [1, 1, 1, 7]:
        metrics.observe("headrace_window_requests", size, ONLINE)
    table = report.windows(generate_latest(metrics.registry).decode())
    cells = [next(iter(column.cells)) for column in table.columns]
    assert cells == [ONLINE, "4", "10", "2.5", "1", "8"]
