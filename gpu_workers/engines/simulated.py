"""The simulated engine: a timed model of a GPU, over a real or a virtual clock, with faults on demand.

``simulated_plan`` says what is answered (and lists the fault words), ``simulated_gpu`` when. With all
rates at 0 no time passes: a batch of jobs ends in one call on the clock's next turn, at a few
microseconds a job. With ``engine.closed_batches`` it gives all answers back when the last one is complete.
"""

from __future__ import annotations

import asyncio
import collections
import os
import signal
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import cast

from contract.errors import EngineDied, FatalError, HeadraceError, InvalidRequest, TransientError
from contract.messages import Request
from contract.money import Usage
from contract.settings import Settings
from gpu_workers.engine import Completion, EngineInfo, EngineStats, Job, Listener, Prepared
from gpu_workers.engines.clock import Clock
from gpu_workers.engines.simulated_gpu import SimulatedGpu, Speed
from gpu_workers.engines.simulated_plan import Plan, plan


class SimulatedEngine:
    """Implements ``Engine``. ``clock`` None: the event loop's own.

    Tests inject what fault words inject: ``die``, ``hang``, and ``resume`` after it.
    """

    def __init__(self, settings: Settings, clock: Clock | None = None) -> None:
        engine, pool = settings.engine, settings.pools[settings.worker.pool]
        self._settings = engine
        self._model = pool.model
        self._default_max_tokens = pool.default_max_tokens
        self._kv_tokens = engine.kv_tokens or engine.max_requests * engine.max_model_len
        self._speed = Speed(
            engine.simulated_prefill_tokens_per_s,
            engine.simulated_step_ms / 1000,
            engine.simulated_step_ms_per_request / 1000,
        )
        self._given_clock = clock
        self._met: collections.Counter[tuple[str, int]] = collections.Counter()
        """How often a prompt met a fault that counts; outlives restarts."""
        self._listener: Listener | None = None
        self._life = object()
        """Changes with each start and end, so that what an earlier life asked for does not happen."""

    # -- Engine -----------------------------------------------------------------------------------

    async def start(self, listener: Listener) -> EngineInfo:
        if self._kv_tokens < self._settings.max_model_len:
            raise FatalError(
                f"engine.kv_tokens = {self._kv_tokens} cannot hold one request of "
                f"engine.max_model_len = {self._settings.max_model_len} tokens; raise the one or lower the other"
            )
        self._end()
        self._clock: Clock = self._given_clock or asyncio.get_running_loop()
        self._gpu = SimulatedGpu(self._speed, slots=self._settings.max_requests, kv_tokens=self._kv_tokens)
        self._jobs: dict[int, Job] = {}
        self._left: dict[int, set[int]] = {}
        """Per job in the GPU, which of its choices still run."""
        self._due: list[Job] = []
        self._batch: list[Job] = []
        """Complete, but of a closed batch that is not: such an engine gives back a batch as a whole."""
        self._stepping = False
        self._step_ends_s = 0.0
        self._deaf = False
        self._withheld: list[Callable[[], None]] = []
        self._ears: set[asyncio.Future[None]] = set()
        self._listener = listener
        return EngineInfo(
            model=self._model,
            max_requests=self._settings.max_requests,
            max_model_len=self._settings.max_model_len,
            kv_tokens=self._kv_tokens,
        )

    def prepare(self, requests: Sequence[Request]) -> list[Prepared | InvalidRequest]:
        return [self._prepare(request) for request in requests]

    def _prepare(self, request: Request) -> Prepared | InvalidRequest:
        try:
            planned, limit = plan(
                request,
                model=self._model,
                max_model_len=self._settings.max_model_len,
                default_max_tokens=self._default_max_tokens,
                faults=self._settings.simulated_faults,
            )
        except InvalidRequest as error:
            return error
        return Prepared(request, planned.prompt_tokens, limit, planned)

    def submit(self, jobs: Sequence[Job]) -> None:
        if self._listener is None:
            return  # lost with the engine, as the jobs it held
        if not self._due:
            self._later(0, self._take_in)
        self._due += jobs
        self._jobs.update((job.job_id, job) for job in jobs)

    def cancel(self, job_ids: Collection[int]) -> None:
        if self._listener is not None:
            job_ids = tuple(job_ids)
            self._later(0, lambda: self._deliver(self._cut(job_ids)))

    def stats(self) -> EngineStats:
        if self._listener is None:
            return EngineStats()
        gpu = self._gpu
        running = len(self._jobs) if self._speed.at_once else gpu.running
        return EngineStats(running, gpu.waiting, gpu.kv_held_tokens / self._kv_tokens, gpu.preemptions)

    async def probe(self, timeout_s: float) -> None:
        if self._listener is not None and self._deaf:
            ear = asyncio.get_running_loop().create_future()
            self._ears.add(ear)
            timer = self._clock.call_later(timeout_s, lambda: _wake(ear))
            try:
                await ear
            finally:
                timer.cancel()
                self._ears.discard(ear)
        if self._listener is None or self._deaf:
            raise EngineDied(f"the simulated engine gave no sign of life within {timeout_s:g} s")

    async def stop(self, timeout_s: float) -> None:
        self._end()

    # -- faults on demand -------------------------------------------------------------------------

    def die(self, reason: str = "the simulated engine was told to die") -> None:
        """The engine dies now, with all it holds."""
        listener = self._listener
        if listener is not None:
            self._end()
            listener.died(EngineDied(reason))

    def hang(self) -> None:
        """The core goes deaf: nothing ends and no round trip comes back."""
        self._deaf = True

    def resume(self) -> None:
        """The core hears again and goes on where it was."""
        self._deaf = False
        self._step_ends_s = self._clock.time()
        withheld, self._withheld = self._withheld, []
        for action in withheld:
            action()
        self._wake_ears()

    def _suffer(self, job: Job) -> None:
        """What the fault words of a job do when it reaches the engine."""
        planned = _plan_of(job)
        faults = planned.faults or {}
        if "crash" in faults:
            os.kill(os.getpid(), signal.SIGKILL)
        elif "die" in faults or ("die-once" in faults and self._first_time("die", planned)):
            self.die("a request's fault word")
        elif "hang" in faults and self._first_time(f"hang {job.job_id}", planned):
            self.hang()
        elif "invalid" in faults:
            self._fail(job, InvalidRequest("a fault word makes this request invalid", code="fault"))
        elif "transient" in faults or ("transient-once" in faults and self._first_time("transient", planned)):
            self._fail(job, TransientError("a fault word makes this try fail", code="fault"))

    def _first_time(self, fault: str, planned: Plan) -> bool:
        self._met[fault, planned.fingerprint] += 1
        return self._met[fault, planned.fingerprint] == 1

    def _fail(self, job: Job, error: HeadraceError) -> None:
        del self._jobs[job.job_id]
        self._deliver([Completion(job.job_id, Usage(_plan_of(job).prompt_tokens), error=error)])

    # -- life of a job ----------------------------------------------------------------------------

    def _take_in(self) -> None:
        """Takes in what was submitted since the last turn; without a GPU it is also the end of it."""
        due, self._due = self._due, []
        life = self._life
        for job in due:
            if _plan_of(job).faults is not None and job.job_id in self._jobs:
                self._suffer(job)
                if self._life is not life:
                    return
                if self._deaf:
                    break
        if self._deaf:
            self._due = due + self._due
            self._withheld.append(self._take_in)
        elif self._speed.at_once:
            self._deliver(self._complete(due))
        else:
            for job in due:
                if job.job_id in self._jobs:
                    self._enter(job)
            self._begin_steps()

    def _enter(self, job: Job) -> None:
        planned = _plan_of(job)
        self._left[job.job_id] = set(range(len(planned.choices)))
        for index, choice in enumerate(planned.choices):
            self._gpu.add(
                (job.job_id, index),
                prompt_tokens=planned.prompt_tokens,
                output_tokens=choice.tokens,
                priority=job.priority,
            )

    def _begin_steps(self) -> None:
        """Sets an idle GPU going. All that came in this turn takes part in the first step."""
        duration_s = None if self._stepping else self._gpu.begin_step()
        if duration_s is not None:
            self._stepping = True
            self._step_ends_s = self._clock.time() + duration_s
            self._later(duration_s, self._end_steps)

    def _end_steps(self) -> None:
        """Ends the step that is due, and those behind it when the clock ran ahead of us."""
        now_s = self._clock.time()
        ended: list[Job] = []
        while self._stepping and self._step_ends_s <= now_s:
            for job_id, index in cast(list[tuple[int, int]], self._gpu.end_step()):
                left = self._left[job_id]
                left.discard(index)
                if not left:
                    ended.append(self._jobs[job_id])
            duration_s = self._gpu.begin_step()
            self._stepping = duration_s is not None
            self._step_ends_s += duration_s or 0.0
        if self._stepping:
            self._later(self._step_ends_s - now_s, self._end_steps)
        if self._settings.closed_batches:
            self._batch += ended
            ended, self._batch = ([], self._batch) if self._stepping else (self._batch, [])
        self._deliver(self._complete(ended))

    def _complete(self, jobs: Iterable[Job]) -> list[Completion]:
        """Whole answers of those jobs that are still wanted; a slow one comes by itself later."""
        completions = []
        for job in jobs:
            planned = _plan_of(job)
            if planned.faults is not None and "slow" in planned.faults and job.job_id in self._jobs:
                self._later(planned.faults["slow"] / 1000, lambda job=job: self._deliver(self._answer([job])))  # type: ignore[misc]
            else:
                completions += self._answer((job,))
        return completions

    def _answer(self, jobs: Iterable[Job]) -> list[Completion]:
        completions = []
        for job in jobs:
            if self._jobs.pop(job.job_id, None) is not None:
                self._left.pop(job.job_id, None)
                answers, usage = _plan_of(job).answer()
                completions.append(Completion(job.job_id, usage, answers))
        return completions

    def _cut(self, job_ids: Iterable[int]) -> list[Completion]:
        """Ends jobs where they are, with what there is of their answers."""
        completions = []
        for job_id in job_ids:
            job = self._jobs.pop(job_id, None)
            if job is not None:
                planned = _plan_of(job)
                left = self._left.pop(job_id, None)
                produced = [
                    choice.tokens if left is not None and index not in left else self._gpu.remove((job_id, index))
                    for index, choice in enumerate(planned.choices)
                ]
                answers, usage = planned.cut(produced)
                completions.append(Completion(job_id, usage, answers, cancelled=True))
        return completions

    # -- plumbing ---------------------------------------------------------------------------------

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Does ``action`` after ``delay_s`` in this life; while the core is deaf it has to wait."""
        life = self._life

        def act() -> None:
            if self._life is not life:
                return
            if self._deaf:
                self._withheld.append(act)
            else:
                action()

        self._clock.call_later(delay_s, act)

    def _deliver(self, completions: list[Completion]) -> None:
        if completions and self._listener is not None:
            self._listener.finished(completions)

    def _wake_ears(self) -> None:
        for ear in self._ears:
            _wake(ear)

    def _end(self) -> None:
        self._life = object()
        if self._listener is not None:
            self._listener = None
            self._wake_ears()


def _plan_of(job: Job) -> Plan:
    return cast(Plan, job.prepared.payload)


def _wake(ear: asyncio.Future[None]) -> None:
    if not ear.done():
        ear.set_result(None)
