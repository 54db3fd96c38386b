"""A model of a GPU that batches continuously: pure state, moved step by step, no clock, no thread.

Sequences wait, are admitted in order of (priority, arrival) while there are slots and KV room, and get
one token per step. A step costs a fixed time, more with each running sequence, and the prefill of those
just admitted. When the KV cache is full the worst sequence is preempted: it keeps its tokens, gives up
its room, waits again in its old place and is prefilled anew, as in vLLM.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Hashable


@dataclasses.dataclass(frozen=True, slots=True)
class Speed:
    """How long steps take. 0 everywhere: no time at all."""

    prefill_tokens_per_s: float = 0.0
    """0: prefill takes no time."""
    step_s: float = 0.0
    step_per_sequence_s: float = 0.0

    @property
    def at_once(self) -> bool:
        return not (self.prefill_tokens_per_s or self.step_s or self.step_per_sequence_s)


@dataclasses.dataclass(slots=True)
class _Sequence:
    key: Hashable
    prompt_tokens: int
    output_tokens: int
    rank: tuple[int, int]
    """(priority, arrival): lower goes first, the highest is preempted first."""
    produced: int = 0

    @property
    def held_tokens(self) -> int:
        return self.prompt_tokens + self.produced


class SimulatedGpu:
    """Turn by turn: ``begin_step`` says how long the step takes, ``end_step`` who is complete.

    Any sequence must fit alone: prompt + output ≤ ``kv_tokens``. ``add`` and ``remove`` may come between
    the two halves of a step; what is added then takes part from the next step on.
    """

    def __init__(self, speed: Speed, *, slots: int, kv_tokens: int) -> None:
        self._speed = speed
        self._slots = slots
        self._kv_tokens = kv_tokens
        self._arrivals = itertools.count()
        self._waiting: list[tuple[tuple[int, int], Hashable]] = []
        self._known: dict[Hashable, _Sequence] = {}
        self._running: dict[Hashable, _Sequence] = {}
        self._kv_held = 0
        self.preemptions = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._known) - len(self._running)

    @property
    def kv_held_tokens(self) -> int:
        return self._kv_held

    def add(self, key: Hashable, *, prompt_tokens: int, output_tokens: int, priority: int = 0) -> None:
        """A sequence that ends after ``output_tokens`` ≥ 1 tokens. ``key`` must not be known already."""
        if key in self._known:
            raise ValueError(f"sequence {key!r} is already here")
        if prompt_tokens + output_tokens > self._kv_tokens:
            raise ValueError(f"sequence {key!r} could never fit into {self._kv_tokens} KV tokens")
        sequence = _Sequence(key, prompt_tokens, output_tokens, (priority, next(self._arrivals)))
        self._known[key] = sequence
        heapq.heappush(self._waiting, (sequence.rank, key))

    def remove(self, key: Hashable) -> int:
        """Takes a sequence out wherever it is; the tokens it had produced. Unknown: 0."""
        sequence = self._known.pop(key, None)
        if sequence is None:
            return 0
        if self._running.pop(key, None) is not None:
            self._kv_held -= sequence.held_tokens
        return sequence.produced

    def begin_step(self) -> float | None:
        """Preempts, admits, and says how many seconds the step takes. None: there is nothing to do."""
        if not self._preempt():
            prefill_tokens = self._admit()
        else:
            prefill_tokens = 0
        if not self._running:
            return None
        speed = self._speed
        prefill_s = prefill_tokens / speed.prefill_tokens_per_s if speed.prefill_tokens_per_s else 0.0
        return speed.step_s + speed.step_per_sequence_s * len(self._running) + prefill_s

    def end_step(self) -> list[Hashable]:
        """Gives each running sequence its token; those that are complete leave and are returned."""
        complete = []
        for sequence in self._running.values():
            sequence.produced += 1
            if sequence.produced >= sequence.output_tokens:
                complete.append(sequence.key)
        self._kv_held += len(self._running)
        for key in complete:
            self.remove(key)
        return complete

    def _preempt(self) -> bool:
        """Makes room for this step's tokens; whether anybody had to go."""
        preempted = False
        while self._kv_held + len(self._running) > self._kv_tokens:
            worst = max(self._running.values(), key=lambda sequence: sequence.rank)
            del self._running[worst.key]
            self._kv_held -= worst.held_tokens
            heapq.heappush(self._waiting, (worst.rank, worst.key))
            self.preemptions += 1
            preempted = True
        return preempted

    def _admit(self) -> int:
        """Lets waiting sequences in, in order; the tokens to prefill for them."""
        prefill_tokens = 0
        while self._waiting and len(self._running) < self._slots:
            sequence = self._known.get(self._waiting[0][1])
            if sequence is None or sequence.rank != self._waiting[0][0]:
                heapq.heappop(self._waiting)  # removed meanwhile
                continue
            tokens_after_step = self._kv_held + sequence.held_tokens + len(self._running) + 1
            if tokens_after_step > self._kv_tokens:
                break
            heapq.heappop(self._waiting)
            self._running[sequence.key] = sequence
            self._kv_held += sequence.held_tokens
            prefill_tokens += sequence.held_tokens
        return prefill_tokens
