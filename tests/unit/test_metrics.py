"""The catalogue in a registry: bounded, and always scrapable. (B26)"""

from __future__ import annotations

from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from contract.metrics import CATALOGUE, OTHER, Metrics

KNOWN = {"class": ["online", "offline"], "bucket": ["short", "long"], "status": ["ok", "failed"]}


def series(registry: CollectorRegistry) -> int:
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return sum(len(family.samples) for family in families)


def test_ten_thousand_unknown_values_are_one_series() -> None:
    metrics = Metrics(KNOWN)
    for status in ("ok", OTHER):
        metrics.count("headrace_requests_total", "online", "short", status)
        metrics.count("headrace_dead_letters_total", OTHER)
    before = series(metrics.registry)
    for number in range(10_000):
        metrics.count("headrace_requests_total", "online", "short", f"status-{number}")
        metrics.count("headrace_dead_letters_total", f"reason-{number}")
    assert series(metrics.registry) == before
    value = metrics.registry.get_sample_value(
        "headrace_requests_total", {"class": "online", "bucket": "short", "status": OTHER}
    )
    assert value == 10_001


@pytest.mark.parametrize("odd", [None, "None", "", "cut \ud83d", "x" * 1_000_000, 'quote " and\nline feed', 7, b"ok"])
def test_odd_label_is_other_and_the_page_still_parses(odd: Any) -> None:
    metrics = Metrics(KNOWN)
    metrics.count("headrace_requests_total", cast(str, odd), "short", "ok")
    page = generate_latest(metrics.registry).decode()
    assert len(page) < 50_000
    assert list(text_string_to_metric_families(page))
    value = metrics.registry.get_sample_value(
        "headrace_requests_total", {"class": OTHER, "bucket": "short", "status": "ok"}
    )
    assert value == 1


def test_known_value_with_odd_characters_is_still_scrapable() -> None:
    metrics = Metrics({"class": ['a "quoted"\nname']})
    metrics.count("headrace_records_total", 'a "quoted"\nname')
    assert list(text_string_to_metric_families(generate_latest(metrics.registry).decode()))


def test_each_kind_of_metric_takes_its_own_verb_only() -> None:
    metrics = Metrics(KNOWN)
    metrics.set("headrace_engine_up", 1)
    metrics.observe("headrace_settle_seconds", 0.2)
    metrics.count("headrace_records_total", "online", by=3)
    assert metrics.registry.get_sample_value("headrace_engine_up") == 1
    assert metrics.registry.get_sample_value("headrace_settle_seconds_count") == 1
    assert metrics.registry.get_sample_value("headrace_records_total", {"class": "online"}) == 3
    with pytest.raises(KeyError):
        metrics.count("headrace_no_such_thing")
    with pytest.raises(ValueError, match="argument"):
        metrics.count("headrace_records_total", "online", "one label too many")


def test_names_are_unique_and_tell_kind_and_unit() -> None:
    names = [metric.name for metric in CATALOGUE]
    assert len(set(names)) == len(names)
    for metric in CATALOGUE:
        assert metric.name.startswith("headrace_")
        assert metric.name.endswith("_total") is (metric.kind == "counter"), metric.name
        assert metric.help.endswith(".")
        assert bool(metric.buckets) is (metric.kind == "histogram"), metric.name
        assert not {"id", "key", "user", "model", "source"} & set(metric.labels)


def test_many_observations_count_like_as_many_single_ones() -> None:
    values = [0.0, 0.005, 0.0051, 3.0, 3_600.0, 1e9]
    together, apart = Metrics(KNOWN), Metrics(KNOWN)
    together.observe_all("headrace_latency_seconds", values, "online", "short")
    for value in values:
        apart.observe("headrace_latency_seconds", value, "online", "short")
    pages = [generate_latest(one.registry).decode().splitlines() for one in (together, apart)]
    first, second = ([line for line in page if "latency" in line] for page in pages)
    assert first == second
    of = {"class": "online", "bucket": "short"}

    def value_of(suffix: str, **more: str) -> float | None:
        return together.registry.get_sample_value(f"headrace_latency_seconds{suffix}", of | more)

    assert value_of("_bucket", le="0.005") == 2  # a bound belongs to its bucket
    assert value_of("_bucket", le="0.01") == 3
    assert value_of("_bucket", le="3600.0") == 5
    assert value_of("_bucket", le="+Inf") == value_of("_count") == 6
    assert value_of("_sum") == pytest.approx(sum(values))
