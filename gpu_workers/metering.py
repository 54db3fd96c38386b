"""Who pays for which nanosecond. Pure; time is an argument, all of it integer ns.

While requests are in the engine, its time is *busy* and is shared among them in proportion to their
weights by fair-queueing virtual time (Demers, Keshav, Shenker 1989: each member is served at rate
w / Σw): virtual time V advances by dt / Σw, and a request that entered at V₀ and leaves at V₁ with
constant weight w has used w × (V₁ - V₀). Each event costs O(1), however many requests are inside.

V is a fixed-point integer and its division remainder is carried, so nothing is lost: what the floor of
each share leaves over is the *rounding* line. Σ shares + rounding = busy, exactly, whenever the engine
is empty. The split itself is a stated approximation: the weights say how a GPU step's time is thought
to divide (see ``weight``), not what a profiler would measure.
"""

from __future__ import annotations

import msgspec

from contract.statuses import WorkerState
from storage.rows import TimeRow

_SHIFT = 32
_UNIT = 1 << _SHIFT
_WEIGHT_SCALE = 1024
_PREFILL_TOKEN_COST = 8
"""A prompt token costs 1/8 of an output token: prefill is compute-bound and batched, decode is not."""


def weight(prompt_tokens: int, output_tokens: int, choices: int) -> int:
    """A request's weight while it is in the engine, fixed point (1,024 = one decoding sequence).

    n sequences decode side by side; its prompt adds work that is spread over its steps:
    w = n + prompt / (8 × output).
    """
    return choices * _WEIGHT_SCALE + (prompt_tokens * _WEIGHT_SCALE) // (_PREFILL_TOKEN_COST * max(1, output_tokens))


class _Member(msgspec.Struct):
    weight: int
    entered_at: int
    """Virtual time."""


class Meter:
    """Time by state, and each request's share of the busy part. One owner.

    Args:
        start_ns: when the process started: from there on every ns is in one state.
    """

    def __init__(self, worker_epoch: int, start_ns: int) -> None:
        self._worker_epoch = worker_epoch
        self._start_ns = start_ns
        self._now_ns = start_ns
        self._base = WorkerState.STARTING
        self._ns = dict.fromkeys(WorkerState, 0)
        self._members: dict[int, _Member] = {}
        self._total_weight = 0
        self._virtual = 0
        self._remainder = 0
        self._allocated_ns = 0
        self._busy_flushed_ns = 0
        self._rounding_ns = 0
        self._flushed = dict.fromkeys(WorkerState, 0)
        self._seq = 0

    @property
    def state(self) -> WorkerState:
        """Busy while anything is in the engine; else what the worker last said it is."""
        return WorkerState.BUSY if self._members else self._base

    def provisioned_ns(self) -> int:
        """From process start to the latest event, measured by one subtraction, not by adding states."""
        return self._now_ns - self._start_ns

    def advance(self, now_ns: int) -> None:
        """Lets time pass. A clock that steps back is read as standing still."""
        elapsed_ns = now_ns - self._now_ns
        if elapsed_ns <= 0:
            return
        self._now_ns = now_ns
        self._ns[self.state] += elapsed_ns
        if self._total_weight:
            step, self._remainder = divmod(elapsed_ns * _UNIT + self._remainder, self._total_weight)
            self._virtual += step

    def become(self, state: WorkerState, now_ns: int) -> None:
        """The worker's own state from now on; shows while the engine is empty."""
        self.advance(now_ns)
        self._base = state

    def enter(self, job_id: int, job_weight: int, now_ns: int) -> None:
        """A job enters the engine."""
        self.advance(now_ns)
        self._members[job_id] = _Member(job_weight, self._virtual)
        self._total_weight += job_weight

    def leave(self, job_id: int, now_ns: int) -> int:
        """A job leaves; its share of busy time in ns. Unknown jobs have none."""
        self.advance(now_ns)
        member = self._members.pop(job_id, None)
        if member is None:
            return 0
        self._total_weight -= member.weight
        share_ns = (self._virtual - member.entered_at) * member.weight >> _SHIFT
        self._allocated_ns += share_ns
        if not self._members:
            # Nobody is inside: what division left over belongs to no request.
            self._remainder = 0
            self._virtual = 0
            self._rounding_ns = self._ns[WorkerState.BUSY] - self._allocated_ns
        return share_ns

    def flush(self, now_ns: int, at_ms: int) -> TimeRow:
        """Time by state since the previous flush. Rounding is told when the engine was last empty."""
        self.advance(now_ns)
        self._seq += 1
        since = {state: self._ns[state] - self._flushed[state] for state in WorkerState}
        rounding_ns = self._rounding_ns
        self._rounding_ns = 0
        self._allocated_ns += rounding_ns
        self._flushed = dict(self._ns)
        return TimeRow(
            worker_epoch=self._worker_epoch,
            seq=self._seq,
            at_ms=at_ms,
            starting_ns=since[WorkerState.STARTING],
            idle_ns=since[WorkerState.IDLE],
            busy_ns=since[WorkerState.BUSY],
            draining_ns=since[WorkerState.DRAINING],
            stalled_ns=since[WorkerState.STALLED],
            rounding_ns=rounding_ns,
        )
