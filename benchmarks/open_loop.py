"""Requests that come when they come, however busy the worker is, and what each of them met.

Latency is that of the results row: from the broker's append time to the commit of the answer. Several worlds can be
given the same requests at the same moments, so that they differ in nothing but their settings.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import confluent_kafka as ck

from benchmarks import asks
from benchmarks.asks import Ask
from broker import config
from contract.settings import Settings
from producers.estimate import Estimator
from producers.prepare import Options, Preparer
from tests.acceptance.harness import World

_FLUSH_S = 30.0
_LATE_S = 1.0
"""A publisher further behind its plan than this has offered another load than it says."""


class Arrival(NamedTuple):
    """One request and when it comes, s since the start."""

    at_s: float
    ask: Ask


class Served(NamedTuple):
    """What a request met: ms in all, before the engine and in it; wall clock, ms."""

    latency_ms: float
    queue_ms: float
    inference_ms: float
    appended_ms: int
    output_tokens: int


def poisson(given: Sequence[Ask], per_s: float, seed: str) -> list[Arrival]:
    """All of ``given``, in order, at Poisson times."""
    at_s = 0.0
    plan = []
    for ask, gap_s in zip(given, asks.gaps_s(per_s, seed), strict=False):
        at_s += gap_s
        plan.append(Arrival(at_s, ask))
    return plan


class Publisher:
    """Publishes to one class as the client does."""

    def __init__(self, settings: Settings, class_name: str) -> None:
        self._preparer = Preparer(settings, Estimator(settings))
        self._options = Options(class_name=class_name, reply=False)
        self._producer = ck.Producer(config.producer_config(settings) | {"linger.ms": 1})
        self._failed: list[object] = []

    def send(self, request: Mapping[str, Any]) -> None:
        """Hands the request over; the library sends it within a millisecond."""
        one = self._preparer.prepare(request, self._options, int(time.time() * 1_000), None)
        self._producer.produce(
            one.ticket.topic, one.value, one.key, headers=one.headers,
            on_delivery=lambda error, _: self._failed.append(error) if error else None,
        )  # fmt: skip
        self._producer.poll(0)

    def finish(self) -> None:
        """Returns when all are acknowledged."""
        if self._producer.flush(_FLUSH_S) or self._failed:
            raise RuntimeError(f"not all requests could be published: {self._failed[:3]}")


def publish(publishers: Sequence[Publisher], plan: Sequence[Arrival]) -> None:
    """Sends each request at its time, to all. Raises when the machine could not keep to the plan."""
    start_s = time.monotonic()
    for at_s, ask in plan:
        wait_s = start_s + at_s - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
        elif wait_s < -_LATE_S:
            raise RuntimeError(f"the publisher is {-wait_s:.1f} s behind its plan: the machine is too busy to measure")
        for publisher in publishers:
            publisher.send(ask.prompt())
    for publisher in publishers:
        publisher.finish()


def served(world: World, given: Sequence[Ask]) -> dict[str, Served]:
    """By id. Raises when one of ``given`` was not answered."""
    rows = world.query(
        "SELECT id, latency_ms, queue_ms, inference_ms, appended_ms, output_tokens FROM results"
        " WHERE status = 'ok' AND id = ANY(%s)",
        [ask.id for ask in given],
    )
    if len(rows) != len(given):
        raise RuntimeError(f"{len(rows)} of {len(given)} requests were answered")
    return {row[0]: Served(*row[1:]) for row in rows}


def p99(values: Sequence[float]) -> float:
    """The 99th percentile."""
    return statistics.quantiles(values, n=100, method="inclusive")[98]
