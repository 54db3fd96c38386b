"""The engine protocol: a page of promises. One conformance suite runs over every implementation.

The worker owns one engine. It prepares requests on any thread, submits jobs and cancels them on the
event loop's thread, and hears through a ``Listener`` on that same thread. The engine keeps no queue
of its own: the worker never submits more than ``EngineInfo.max_requests`` at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import msgspec

from contract.errors import EngineDied, HeadraceError, InvalidRequest
from contract.messages import Request
from contract.money import Usage


@dataclasses.dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a started engine can hold."""

    model: str
    max_requests: int
    max_model_len: int
    kv_tokens: int
    """Room of the KV cache, tokens."""
    pids: tuple[int, ...] = ()
    """Processes that belong to the engine, besides this one."""


class Prepared(msgspec.Struct):
    """A request ready for the engine: exactly typed, tokenised, checked. Survives an engine restart."""

    request: Request
    prompt_tokens: int
    max_output_tokens: int
    """Per choice, already cut to the room the context leaves."""
    payload: Any
    """What ``submit`` hands over; only the engine that prepared it looks inside."""

    @property
    def kv_tokens(self) -> int:
        """Most KV room it can come to hold: the prompt once, the output per choice."""
        return self.prompt_tokens + self.max_output_tokens * self.request.n


class Job(msgspec.Struct):
    """One attempt of one prepared request. ``job_id`` is unique over the worker's life."""

    job_id: int
    prepared: Prepared
    priority: int = 0
    """Lower is served first."""


class Completion(msgspec.Struct):
    """How a job ended. Exactly one of choices and error is set; usage counts what was really done."""

    job_id: int
    usage: Usage
    choices: list[dict[str, Any]] | None = None
    """OpenAI-shaped: index, text or message, finish_reason, logprobs."""
    error: HeadraceError | None = None
    """InvalidRequest: its own fault. TransientError: not processed, may be tried again."""
    cancelled: bool = False
    """Ended because the worker cancelled it; ``choices`` holds what there was."""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineStats:
    """A glance at the engine; costs nothing."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    """0 to 1."""
    preemptions: int = 0


class Listener(Protocol):
    """Who hears from the engine, always on the event loop's thread. Neither method may block or raise."""

    def finished(self, completions: Sequence[Completion]) -> None:
        """Some jobs ended. Each submitted job is named exactly once, unless the engine died first."""

    def died(self, error: EngineDied) -> None:
        """The engine is dead. Called once per start. No completion follows; every job still out is lost with it."""


class Engine(Protocol):
    """Answers jobs. ``start`` after ``stop`` or a death makes a new engine of the same settings; jobs
    submitted to one that is dead or stopped are lost with it, without a word."""

    async def start(self, listener: Listener) -> EngineInfo:
        """Loads the model; returns when it can take jobs. Raises ``FatalError`` with what to do."""

    def prepare(self, requests: Sequence[Request]) -> list[Prepared | InvalidRequest]:
        """Checks, templates and tokenises; one entry per request, in order. Any thread, after the first
        ``start``, also while the engine restarts. CPU work only; never raises for one request."""

    def submit(self, jobs: Sequence[Job]) -> None:
        """Takes jobs. Loop thread; returns at once; a fault of one job is its completion's error."""

    def cancel(self, job_ids: Collection[int]) -> None:
        """Asks for jobs to end; each still ends by its completion. Unknown ids are ignored."""

    def stats(self) -> EngineStats:
        """The latest figures, without a round trip."""

    async def probe(self, timeout_s: float) -> None:
        """A real round trip to the engine's core. Raises ``EngineDied`` when none comes back in time."""

    async def stop(self, timeout_s: float) -> None:
        """Ends the engine and its processes, by force at the deadline. Jobs still out are dropped without
        a word. Harmless when stopped or dead already. When it returns no process of it that holds a model
        is left; an empty one that makes the next start quick may stay until this process ends. An endpoint that the
        engine only speaks to is none of its processes."""
