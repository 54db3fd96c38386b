"""The catalogue of metrics: name, kind, unit, labels and what a high value tells you.

No metric is created anywhere else. Labels are bounded: a value that is not in the label's known set
becomes ``other``; nothing that a request carries is ever a label unchecked, never an id.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

OTHER = "other"
_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 3600)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclasses.dataclass(frozen=True, slots=True)
class Metric:
    """One line of the catalogue."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


CATALOGUE = (
    Metric("headrace_requests_total", "counter", "Requests settled.", ("class", "bucket", "status")),
    Metric("headrace_records_total", "counter", "Records read from request topics.", ("class",)),
    Metric("headrace_dead_letters_total", "counter", "Records dead-lettered, by reason code.", ("reason",)),
    Metric(
        "headrace_lost_records_total",
        "counter",
        "Records that retention took before they were read. Never normal.",
        ("class",),
    ),
    Metric(
        "headrace_duplicates_total",
        "counter",
        "Requests answered from the store. High: redelivery or resending.",
        ("class",),
    ),
    Metric("headrace_queue_seconds", "histogram", "From append to the engine.", ("class", "bucket"), _LATENCY_S),
    Metric("headrace_inference_seconds", "histogram", "In the engine.", ("class", "bucket"), _LATENCY_S),
    Metric("headrace_latency_seconds", "histogram", "From append until settled.", ("class", "bucket"), _LATENCY_S),
    Metric("headrace_tokens_total", "counter", "Tokens of settled requests.", ("kind",)),
    Metric(
        "headrace_window_requests",
        "histogram",
        "Requests per window. All at 1: too little load to batch.",
        ("class",),
        _SIZES,
    ),
    Metric("headrace_settle_requests", "histogram", "Requests per settlement.", (), _SIZES),
    Metric("headrace_settle_seconds", "histogram", "One settlement's transaction.", (), _LATENCY_S),
    Metric(
        "headrace_settle_retries_total", "counter", "Settlements tried again: deadlock, lost connection.", ("reason",)
    ),
    Metric(
        "headrace_in_flight_requests",
        "gauge",
        "Taken from Kafka and not settled. At its mark: Postgres or the engine is slow.",
        ("class", "bucket"),
    ),
    Metric("headrace_in_flight_bytes", "gauge", "The same in bytes.", ("class", "bucket")),
    Metric("headrace_engine_requests", "gauge", "Requests in the engine.", ("class",)),
    Metric("headrace_engine_kv_usage", "gauge", "Share of the KV cache in use, 0 to 1."),
    Metric("headrace_engine_up", "gauge", "1: the engine answers its round trip; 0: dead, hung or starting."),
    Metric("headrace_engine_deaths_total", "counter", "Times the engine died or went silent."),
    Metric("headrace_storage_up", "gauge", "1: the last statement reached Postgres."),
    Metric("headrace_worker_seconds_total", "counter", "Worker time by state.", ("state",)),
    Metric("headrace_paused_partitions", "gauge", "Partitions held back by a high mark.", ("class", "bucket")),
)

_BY_NAME = {metric.name: metric for metric in CATALOGUE}


class _Counts:
    """One label set of a histogram. Takes many values at once, which the library's own cannot."""

    __slots__ = ("_bounds", "_lock", "_numbers", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._numbers = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def add(self, values: Sequence[float]) -> None:
        bounds, numbers, place = self._bounds, self._numbers, bisect.bisect_left
        with self._lock:
            for value in values:
                numbers[place(bounds, value)] += 1
            self._sum += sum(values)

    def snapshot(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative (upper bound, count), and the sum of all values."""
        with self._lock:
            numbers, total = list(self._numbers), self._sum
        bounds = [*map(str, map(float, self._bounds)), "+Inf"]
        return list(zip(bounds, itertools.accumulate(map(float, numbers)), strict=True)), total


class _Histogram(Collector):
    """A histogram of the catalogue: label values → counts."""

    def __init__(self, metric: Metric, registry: CollectorRegistry) -> None:
        self._metric = metric
        self._children: dict[tuple[str, ...], _Counts] = {}
        self._lock = threading.Lock()
        if not metric.labels:
            self.labels()
        registry.register(self)

    def labels(self, *values: str) -> _Counts:
        with self._lock:
            return self._children.setdefault(values, _Counts(self._metric.buckets))

    def describe(self) -> Iterator[HistogramMetricFamily]:
        yield HistogramMetricFamily(self._metric.name, self._metric.help, labels=self._metric.labels)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        (family,) = self.describe()
        with self._lock:
            children = list(self._children.items())
        for values, counts in children:
            buckets, total = counts.snapshot()
            family.add_metric(values, buckets, total)
        yield family


class Metrics:
    """The catalogue in a Prometheus registry, with bounded labels.

    ``known`` gives the set of values per label; labels of closed kinds (``status``, ``state``,
    ``kind``, ``reason``) that are not given are taken from enums by their callers.
    """

    def __init__(self, known: Mapping[str, Iterable[str]], registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self._known = {label: frozenset(values) for label, values in known.items()}
        self._metrics: dict[str, Counter | Gauge | _Histogram] = {}
        self._children: dict[tuple[str, tuple[str, ...]], Counter | Gauge | _Counts] = {}
        for metric in CATALOGUE:
            if metric.kind == "histogram":
                self._metrics[metric.name] = _Histogram(metric, self.registry)
            else:
                kind = Counter if metric.kind == "counter" else Gauge
                self._metrics[metric.name] = kind(metric.name, metric.help, metric.labels, registry=self.registry)

    def _child(self, name: str, values: tuple[str, ...]) -> Counter | Gauge | _Counts:
        child = self._children.get((name, values))
        if child is not None:
            return child
        metric = self._metrics[name]
        labels = _BY_NAME[name].labels
        bounded = tuple(
            value if isinstance(value, str) and value in self._known.get(label, ()) else OTHER
            for label, value in zip(labels, values, strict=True)
        )
        child = metric.labels(*bounded) if labels or isinstance(metric, _Histogram) else metric
        if bounded == values:
            self._children[name, values] = child
        return child

    def count(self, name: str, *labels: str, by: float = 1) -> None:
        """Adds ``by`` to a counter."""
        child = self._child(name, labels)
        assert isinstance(child, Counter)
        child.inc(by)

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Adds one observation to a histogram."""
        self.observe_all(name, (value,), *labels)

    def observe_all(self, name: str, values: Sequence[float], *labels: str) -> None:
        """Adds many observations to a histogram, at a fraction of the cost of one by one."""
        child = self._child(name, labels)
        assert isinstance(child, _Counts)
        child.add(values)

    def set(self, name: str, value: float, *labels: str) -> None:
        """Sets a gauge."""
        child = self._child(name, labels)
        assert isinstance(child, Gauge)
        child.set(value)
