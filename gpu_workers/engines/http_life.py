"""One life of an endpoint, from the first check that it passed to its death or our stop.

One asyncio task per job. What the endpoint says about a request (a 4xx) is that request's fate. When it fails
to answer one (5xx, a broken connection, half an answer), the question is whose fault that is: one check, shared
by all that fail meanwhile, asks the endpoint for one token. If it lives, each failed job ends with
``TransientError``, and one that never reached it is asked anew. If not, the engine died: nobody's try is used
up, and the worker hears it once. Connections that all break together are a death too: a server that is
restarted at once answers the check, but it is not the server that was asked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence

from contract.errors import EngineDied, HeadraceError, InvalidRequest, TransientError
from contract.money import Usage
from gpu_workers.engine import Completion, EngineStats, Job, Listener
from gpu_workers.engines import choices, http_output
from gpu_workers.engines.http_endpoint import Endpoint, Reply, Unreachable
from gpu_workers.engines.http_params import Dialect

_BACKOFF_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""After a 429 that does not say when to come again."""
_LONGEST_WAIT_S = 30.0
"""Who is told to wait longer is sent back: the worker decides whether there is time for another try."""
_PERHAPS_NOT_THE_REQUESTS_FAULT = (401, 403, 404)
"""4xx that may also mean that the endpoint changed: the key was revoked, the model is gone."""
_TOGETHER_S = 0.05
"""Connections of a process that ends break within this time of each other."""
_TASKS_END_S = 2.0


class Life:
    """Feeds one endpoint. Loop thread only.

    Args:
        kv_tokens: what counts as full in ``stats``; the endpoint's own figures are not asked.
    """

    def __init__(
        self, endpoint: Endpoint, listener: Listener, *, dialect: Dialect, check_timeout_s: float, kv_tokens: int
    ) -> None:
        self._endpoint = endpoint
        self._listener = listener
        self._dialect = dialect
        self._check_timeout_s = check_timeout_s
        self._kv_tokens = kv_tokens
        self._loop = asyncio.get_running_loop()
        self._jobs: dict[int, Job] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._on_the_wire: set[int] = set()
        """Jobs whose question is with the endpoint now."""
        self._broken: set[int] = set()
        """Jobs whose connection broke, until the check."""
        self._checking: asyncio.Task[str | None] | None = None
        self._done: list[Completion] = []
        self._answers = 0
        self._answers_at_probe = -1
        self._come_again_s = 0.0
        """Nothing is sent before this time (monotonic): the endpoint asked for it."""
        self._waiting = 0
        self.over = False

    # -- jobs -------------------------------------------------------------------------------------

    def submit(self, jobs: Sequence[Job]) -> None:
        if not self.over:
            for job in jobs:
                self._jobs[job.job_id] = job
                self._tasks[job.job_id] = self._loop.create_task(self._answer(job))

    def cancel(self, job_ids: Collection[int]) -> None:
        for job_id in job_ids:
            job = self._jobs.get(job_id)
            if job is not None and not self.over:
                self._tasks[job_id].cancel()  # closes its connection, and the endpoint stops working on it
                self._end_job(_cut(job))

    async def _answer(self, job: Job) -> None:
        payload = job.prepared.payload
        body = payload.with_priority(job.priority) if self._dialect == "vllm" else payload.body
        refusals = 0
        while True:
            await self._come_again()
            try:
                reply = await self._ask(job.job_id, payload.path, body)
            except Unreachable as error:
                if error.stage == "connecting":
                    if await self._lives():
                        continue
                    return
                doubt: HeadraceError = TransientError(f"the endpoint failed: {error}", code="engine_error")
            else:
                if reply.busy:
                    wait_s = self._wait_s(reply, refusals)
                    if wait_s > _LONGEST_WAIT_S:
                        text = f"the endpoint asks to come again in {wait_s:.0f} s"
                        self._end_job(_failed(job, TransientError(text, code="rate_limited")))
                        return
                    refusals += 1
                    self._come_again_s = max(self._come_again_s, time.monotonic() + wait_s)
                    continue
                if reply.status == 200:
                    try:
                        self._end_job(http_output.completion(job.job_id, job.prepared, reply.body))
                        self._answers += 1
                        return
                    except ValueError as error:
                        doubt = TransientError(f"the endpoint's answer cannot be used: {error}", code="bad_answer")
                elif 400 <= reply.status < 500 and reply.status != 408:
                    doubt = http_output.refusal(reply.status, reply.body, payload)
                    if reply.status not in _PERHAPS_NOT_THE_REQUESTS_FAULT:
                        self._end_job(_failed(job, doubt))
                        return
                else:
                    doubt = http_output.failure(reply.status, reply.body, payload)
            if await self._lives():
                self._end_job(_failed(job, doubt))
            return

    async def _ask(self, job_id: int, path: str, body: bytes) -> Reply:
        self._on_the_wire.add(job_id)
        try:
            return await self._endpoint.post(path, body)
        except Unreachable as error:
            if error.stage == "waiting":
                self._broken.add(job_id)
            raise
        finally:
            self._on_the_wire.discard(job_id)

    def _wait_s(self, reply: Reply, refusals: int) -> float:
        if reply.retry_after_s is not None:
            return reply.retry_after_s
        return _BACKOFF_S[min(refusals, len(_BACKOFF_S) - 1)]

    async def _come_again(self) -> None:
        """Waits until the endpoint wants to be asked again. The worker's own limits end a wait that is too long."""
        while (left_s := self._come_again_s - time.monotonic()) > 0:
            self._waiting += 1
            try:
                await asyncio.sleep(left_s)
            finally:
                self._waiting -= 1

    def _end_job(self, completion: Completion) -> None:
        if self._jobs.pop(completion.job_id, None) is None:
            return
        del self._tasks[completion.job_id]
        if not self._done:
            self._loop.call_soon(self._flush)
        self._done.append(completion)

    def _flush(self) -> None:
        done, self._done = self._done, []
        if done and not self.over:
            self._listener.finished(done)

    # -- life and death ---------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        if self.over:
            return EngineStats()
        held = sum(job.prepared.kv_tokens for job in self._jobs.values())
        running = sum(job.prepared.request.n for job in self._jobs.values())
        return EngineStats(running - self._waiting, self._waiting, min(1.0, held / self._kv_tokens))

    async def probe(self, timeout_s: float) -> None:
        """An answer since the last probe is proof enough; else one token has to come."""
        if self.over:
            raise EngineDied("the endpoint is not in use")
        if self._answers == self._answers_at_probe or self._answers == 0:
            try:
                await self._endpoint.check(timeout_s)
            except Unreachable as error:
                raise EngineDied(f"the endpoint gave no sign of life: {error}") from error
        self._answers_at_probe = self._answers

    async def _lives(self) -> bool:
        """Whether the endpoint answers at all; if not, this life is over."""
        if self._checking is None:
            self._checking = self._loop.create_task(self._check())
        reason = await asyncio.shield(self._checking)
        if reason is not None:
            self._die(reason)
        return not self.over

    async def _check(self) -> str | None:
        """None: it lives. Else why not."""
        asked, answers = self._on_the_wire | self._broken, self._answers
        try:
            await asyncio.sleep(_TOGETHER_S)
            broken, self._broken = self._broken, set()
            if broken and not asked & self._on_the_wire and self._answers == answers:
                return f"the endpoint broke every connection, {len(broken)} at once"
            await self._endpoint.check(self._check_timeout_s)
        except Unreachable as error:
            return f"the endpoint is gone: {error}"
        finally:
            self._checking = None
        return None

    def _die(self, reason: str) -> None:
        if self.over:
            return
        self._flush()  # what was answered before stays answered
        self.over = True
        for task in self._tasks.values():
            if task is not asyncio.current_task():
                task.cancel()
        self._listener.died(EngineDied(reason))

    async def end(self) -> None:
        """Gives up every job and closes the connections. The endpoint lives on."""
        self.over = True
        tasks: list[asyncio.Task[object]] = [*self._tasks.values(), *([self._checking] if self._checking else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_TASKS_END_S)
        await self._endpoint.close()


def _failed(job: Job, error: HeadraceError) -> Completion:
    refused = isinstance(error, InvalidRequest)
    return Completion(job.job_id, Usage() if refused else Usage(job.prepared.prompt_tokens), error=error)


def _cut(job: Job) -> Completion:
    """A cancelled job. What the endpoint had made of it is not known: it was not to be sent in pieces."""
    chat = job.prepared.payload.chat
    answers = [
        choices.choice(chat=chat, index=index, text="", finish_reason="abort")
        for index in range(job.prepared.request.n)
    ]
    return Completion(job.job_id, Usage(job.prepared.prompt_tokens), answers, cancelled=True)
