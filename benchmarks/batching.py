"""What continuous feeding is worth: the same pipeline, engine and requests, set to feed in three ways."""

from __future__ import annotations

import msgspec

from benchmarks import asks, real
from benchmarks.figure import Goal
from benchmarks.real import Pace
from benchmarks.site import Site
from contract.settings import Settings

WINDOW = 12
ONE_BY_ONE, CLOSED, CONTINUOUS = 100, 200, 1_000
"""Requests of each; every hundred of them are of the same lengths."""

NONE_FIXED_CONTINUOUS = (
    Goal(
        "batching.continuous_over_none", "output tokens a second: continuous (64 slots) ÷ one at a time", "×", "≥ 6.7"
    ),
    Goal("batching.fixed_over_none", "output tokens a second: closed windows of 12 ÷ one at a time", "×"),
    Goal("batching.continuous_over_fixed", "output tokens a second: continuous ÷ closed windows of 12", "×"),
    Goal("batching.none_tokens_per_s", "output tokens a second, one at a time", "/s"),
)


def none_fixed_continuous(site: Site) -> dict[str, float]:
    """One request at a time : closed windows of 12 : continuous. Of five answers, four are short and one is long."""
    none = _feed(site, ONE_BY_ONE, max_requests=1)
    closed = _feed(site, CLOSED, max_requests=WINDOW, closed_batches=True)
    continuous = _feed(site, CONTINUOUS)
    return {
        "batching.continuous_over_none": continuous.tokens_per_s / none.tokens_per_s,
        "batching.fixed_over_none": closed.tokens_per_s / none.tokens_per_s,
        "batching.continuous_over_fixed": continuous.tokens_per_s / closed.tokens_per_s,
        "batching.none_tokens_per_s": none.tokens_per_s,
    }


def _feed(site: Site, count: int, **engine: int) -> Pace:
    given = asks.make(asks.TALL, site.scaled(count))
    classes = msgspec.to_builtins(Settings().classes)
    if engine.get("closed_batches"):
        classes["offline"]["window"]["max_requests"] = WINDOW
    return real.through_headrace(
        site,
        given,
        # One bucket, so that windows and batches hold all lengths in the order of publication.
        buckets={"edges": {"all": 1_000_000_000}},
        classes=classes,
        engine=real.sections(**engine)["engine"],
    )
