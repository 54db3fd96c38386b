"""How a request can end, and what that means for the next record that carries the same key."""

from __future__ import annotations

import enum


class Status(enum.StrEnum):
    """The one outcome of a request. Mirrored by a check constraint in the database.

    Every record on a request topic ends as exactly one of these or is still uncommitted.
    """

    OK = "ok"
    """The engine answered as asked."""
    DEGRADED = "degraded"
    """Answered by a lower rung of the degrade ladder; ``degrade_level`` says which."""
    CACHED = "cached"
    """Answered from headrace's own result cache; no engine tokens were used."""
    INVALID = "invalid"
    """The request itself is wrong. Sending the same again gives the same."""
    FAILED = "failed"
    """The engine could not answer although the request is right."""
    EXPIRED = "expired"
    """Its deadline (or the horizon of remembered keys) passed before it could be answered."""
    SHED = "shed"
    """Refused under load, before it used the engine."""
    CANCELLED = "cancelled"
    """Its sender withdrew it."""
    AI_OFF = "ai_off"
    """Answered by the rung of the ladder that uses no model at all."""


ANSWERS = frozenset({Status.OK, Status.DEGRADED, Status.CACHED})
"""Stored answers. The same key on a new record is a duplicate: the stored answer goes out again."""

REFUSALS = frozenset(Status) - ANSWERS
"""The same key on a new record is a resubmission: generation + 1, with its own charge."""


class Waste(enum.StrEnum):
    """Why engine time was spent that no tenant pays for. Each is a line of its own in the ledger."""

    RETRY = "retry"
    """An attempt that failed and was tried again, or gave up."""
    DUPLICATE = "duplicate"
    """Another worker's attempt won the settlement."""
    ABORTED = "aborted"
    """Cut short by a drain, a deadline or a cancel."""
    ENGINE_DEATH = "engine_death"
    """In the engine when the engine died."""
    CRASH = "crash"
    """Measured as busy by a worker that died before it settled the attempt."""
    WARM_UP = "warm_up"
    """The worker's own warm-up requests."""
    SHADOW = "shadow"
    """Shadow traffic."""


class WorkerState(enum.StrEnum):
    """Where a worker's provisioned time goes. The states are exclusive and cover all of it."""

    STARTING = "starting"
    """From process start until the engine is warm."""
    IDLE = "idle"
    """Engine ready, nothing in it."""
    BUSY = "busy"
    """At least one request in the engine."""
    DRAINING = "draining"
    """Told to stop, the engine already empty."""
    STALLED = "stalled"
    """The engine is dead, hung or starting again."""
    LOST = "lost"
    """Provisioned but never reported, because the worker died. Booked by whoever finds it dead."""
