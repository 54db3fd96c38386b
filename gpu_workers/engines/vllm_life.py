"""One life of vLLM's engine, from a core that is up to one that is dead or stopped.

One asyncio task per job waits for its final output. What ends in a turn of the loop goes to the
listener in one call. Death is told once: by vLLM's own error, by the end of the core's process, or by
requests aborted that nobody aborted (a core that was told to shut down does that, without an error).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Collection, Sequence
from typing import Any

import psutil

from contract.errors import EngineDied
from contract.money import Usage
from gpu_workers.engine import Completion, EngineInfo, EngineStats, Job, Listener
from gpu_workers.engines import vllm_output
from gpu_workers.engines.vllm_params import Payload

_OPEN_S = 60.0
_TASKS_END_S = 2.0


class Tap:
    """A vLLM stat logger: called once an engine step, keeps the latest figures. Made by ``Life``."""

    def __init__(self) -> None:
        self.stats = EngineStats()

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        last = self.stats
        running, waiting, usage, preemptions = last.running, last.waiting, last.kv_usage, last.preemptions
        if scheduler_stats is not None:
            running, waiting = scheduler_stats.num_running_reqs, scheduler_stats.num_waiting_reqs
            usage = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            preemptions += iteration_stats.num_preempted_reqs
        self.stats = EngineStats(running, waiting, usage, preemptions)

    def log_engine_initialized(self) -> None:
        """Part of vLLM's interface; nothing to say."""

    def log(self) -> None:
        """Part of vLLM's interface; nothing to say."""


class Life:
    """Feeds one ``AsyncLLM``. Loop thread only."""

    def __init__(self, llm: Any, tap: Tap) -> None:
        self._llm = llm
        self._tap = tap
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._cancelled: set[int] = set()
        self._done: list[Completion] = []
        self._over = False
        self._deaf = False
        self._sentinels: list[int] = []
        self._processes: list[psutil.Process] = []

    async def open(self, listener: Listener, model: str) -> EngineInfo:
        """Makes the first round trip and watches over the core's process from here on."""
        from vllm.inputs import tokens_input

        self._listener = listener
        self._tokens_input = tokens_input
        self._loop = asyncio.get_running_loop()
        cores = self._llm.engine_core.resources.engine_manager.processes
        for core in cores:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(core.pid)
                self._processes += [process, *process.children(recursive=True)]
        # vLLM keeps the answer: from now on no job waits for a round trip before the core knows of it.
        await asyncio.wait_for(self._llm.get_supported_tasks(), _OPEN_S)
        for core in cores:
            sentinel = os.dup(core.sentinel)  # ours: vLLM closes its own when it likes
            self._sentinels.append(sentinel)
            self._loop.add_reader(sentinel, self._die, f"vLLM's core, process {core.pid}, ended")
        config = self._llm.vllm_config
        return EngineInfo(
            model=model,
            max_requests=config.scheduler_config.max_num_seqs,
            max_model_len=config.model_config.max_model_len,
            kv_tokens=config.cache_config.num_gpu_blocks * config.cache_config.block_size,
            pids=tuple(process.pid for process in self._processes),
        )

    # -- jobs -------------------------------------------------------------------------------------

    def submit(self, jobs: Sequence[Job]) -> None:
        if not self._over:
            for job in jobs:
                self._tasks[job.job_id] = self._loop.create_task(self._answer(job))

    def cancel(self, job_ids: Collection[int]) -> None:
        known = [job_id for job_id in job_ids if job_id in self._tasks]
        if known and not self._over:
            self._cancelled.update(known)
            task = self._loop.create_task(self._abort(known))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def _abort(self, job_ids: list[int]) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        with contextlib.suppress(EngineDeadError):  # the jobs' own tasks tell
            await self._llm.abort([str(job_id) for job_id in job_ids])

    async def _answer(self, job: Job) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        payload: Payload = job.prepared.payload
        try:
            if type(job.job_id) is not int or type(job.priority) is not int:
                raise TypeError("job_id and priority must be int")  # the core would go deaf
            prompt = self._tokens_input(payload.token_ids)
            request_id = str(job.job_id)
            outputs = self._llm.generate(prompt, payload.params, request_id, priority=job.priority)
            *_, output = [one async for one in outputs]  # FINAL_ONLY gives one
            cancelled = job.job_id in self._cancelled
            if not cancelled and vllm_output.aborted(output):
                self._die("vLLM's core ends requests that nobody aborted: it is shutting down")
                return
            completion = vllm_output.completion(job.job_id, payload, output, cancelled=cancelled)
        except EngineDeadError as error:
            self._die(f"vLLM's core is dead: {error}")
            return
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this job's
            completion = Completion(job.job_id, Usage(), error=vllm_output.refusal(error))
        self._end_job(completion)

    def _end_job(self, completion: Completion) -> None:
        del self._tasks[completion.job_id]
        self._cancelled.discard(completion.job_id)
        if not self._done:
            self._loop.call_soon(self._flush)
        self._done.append(completion)

    def _flush(self) -> None:
        done, self._done = self._done, []
        if done and not self._over:
            self._listener.finished(done)

    # -- life and death ---------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        return EngineStats() if self._over else self._tap.stats

    async def probe(self, timeout_s: float) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        if self._over:
            raise EngineDied("vLLM's core is dead")
        try:
            await asyncio.wait_for(self._llm.is_sleeping(), timeout_s)
        except TimeoutError:
            self._deaf = True
            raise EngineDied(f"vLLM's core gave no sign of life within {timeout_s:g} s") from None
        except EngineDeadError as error:
            raise EngineDied(f"vLLM's core is dead: {error}") from error

    def _die(self, reason: str) -> None:
        if self._over:
            return
        self._flush()  # what was answered before stays answered
        self._close()
        self._listener.died(EngineDied(reason))

    def _close(self) -> None:
        self._over = True
        for sentinel in self._sentinels:
            self._loop.remove_reader(sentinel)
            os.close(sentinel)
        self._sentinels.clear()

    async def end(self, timeout_s: float) -> None:
        """Ends the core, by force at the deadline, at once when it is dead or deaf. No process of it is left."""
        deadline = self._loop.time() + timeout_s
        by_force = self._over or self._deaf
        if not self._over:
            self._close()
        if by_force:
            await asyncio.to_thread(self._kill)
        tasks = [*self._tasks.values(), *self._aborts]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_TASKS_END_S)
        await asyncio.to_thread(self._llm.shutdown, timeout=max(0.0, deadline - self._loop.time()))
        await asyncio.to_thread(self._kill)

    def _kill(self) -> None:
        for process in list(self._processes):
            with contextlib.suppress(psutil.NoSuchProcess):
                self._processes += process.children(recursive=True)
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(self._processes, timeout=5.0)
