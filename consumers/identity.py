"""Is this record new, a duplicate or a resubmission? Pure; the database applies the same rule again."""

from __future__ import annotations

import enum

from contract.statuses import ANSWERS
from storage.rows import Settled


class Judgement(enum.StrEnum):
    """What to do with a record, from what is remembered of its key."""

    FRESH = "fresh"
    """Nothing is remembered: compute it."""
    DUPLICATE = "duplicate"
    """Publish the stored outcome again; compute and charge nothing."""
    RESUBMISSION = "resubmission"
    """The stored outcome was a refusal and this is a new record: compute it as the next generation."""


def judge(settled: Settled | None, record: str) -> Judgement:
    """``record`` is ``topic/partition/offset``. The same record redelivered is always a duplicate."""
    if settled is None:
        return Judgement.FRESH
    if settled.status in ANSWERS or record in settled.records:
        return Judgement.DUPLICATE
    return Judgement.RESUBMISSION
