"""A real OpenAI-compatible endpoint for tests: real sockets over the simulated engine, and it can misbehave.

Understands vLLM's parameters as ``vllm serve`` does. Runs on the test's own loop (``TestEndpoint``) or as a
process that can be killed: ``python -m tests.integration.http_endpoint PORT``.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import orjson
from aiohttp import web

from contract import settings as contract_settings
from contract.errors import InvalidRequest
from contract.messages import Request, parse_request
from contract.settings import Settings
from gpu_workers.engine import Completion, Job, Prepared
from gpu_workers.engines.simulated import SimulatedEngine

_TAKEN = set(Request.__struct_fields__) - {"v", "id", "source", "model", "tools", "tool_choice", "extra"}
_BEYOND_OPENAI = ("top_k", "min_p", "repetition_penalty", "ignore_eos", "min_tokens", "priority")


class HttpEndpoint:
    """One endpoint. ``faults`` are used up one per question, first in, first out; ``always`` is for every one.

    A fault is an HTTP status, optionally with a ``Retry-After`` ("429 1"), or ``silence``, ``hang up``,
    ``truncated``, ``garbage``, ``no usage``, ``aborted``.
    """

    def __init__(self, settings: Settings, *, key: str = "", strict: bool = False, chat_only: bool = False) -> None:
        self.engine = SimulatedEngine(settings)
        self.model = settings.pools[settings.worker.pool].model
        self.max_model_len = settings.engine.max_model_len
        self.key, self.strict, self.chat_only = key, strict, chat_only
        self.port = 0
        self.faults: collections.deque[str] = collections.deque()
        self.always = ""
        self.bodies: list[dict[str, Any]] = []
        """What was asked, parsed, in order."""
        self.cancelled = 0
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Completion]] = {}
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    # -- Listener of the simulated engine ---------------------------------------------------------

    def finished(self, completions: Sequence[Completion]) -> None:
        for completion in completions:
            waiter = self._waiting.pop(completion.job_id, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(completion)

    def died(self, error: Exception) -> None:
        """As vLLM's server: whoever waits gets a 500."""
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(RuntimeError("EngineCore encountered an issue"))
        self._waiting.clear()

    # -- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listens, on the same port as before if there was one."""
        await self.stop()
        await self.engine.start(self)
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._answer)
        if not self.chat_only:
            app.router.add_post("/v1/completions", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.0, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stops listening and breaks every connection."""
        runner, self._runner = self._runner, None
        if runner is not None:
            if runner.server is not None:
                for connection in list(runner.server.connections):
                    if connection.transport is not None:
                        connection.transport.abort()
            await runner.cleanup()
        await self.engine.stop(0)
        self._waiting.clear()

    async def _health(self, _: web.Request) -> web.Response:
        return _reply({})  # whatever happens, as vLLM's

    # -- answers ----------------------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.Response:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return _error(401, "invalid api key", code="invalid_api_key")
        return _reply({"object": "list", "data": [{"id": self.model, "max_model_len": self.max_model_len}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.bodies.append(body)
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return _error(401, "invalid api key", code="invalid_api_key")
        fault = self.faults.popleft() if self.faults else self.always
        if fault == "silence":
            await asyncio.sleep(3_600)
        if fault == "hang up":
            assert request.transport is not None
            request.transport.abort()
        if fault[:1].isdigit():
            status, _, after = fault.partition(" ")
            return _error(int(status), "cannot schedule new futures after shutdown", after=after)
        if body.get("model") != self.model:
            return _error(404, f"the model {body.get('model')!r} does not exist", code="model_not_found")
        if self.strict and (unknown := [name for name in _BEYOND_OPENAI if name in body]):
            return _error(400, f"unrecognised parameter: {unknown[0]}", param=unknown[0])
        made = await self._complete(body)
        if isinstance(made, InvalidRequest):
            return _error(400, made.message, code=made.code, param=made.param)
        if isinstance(made, Exception):
            return _error(500, str(made))
        return await self._send(request, made, fault)

    async def _complete(self, body: dict[str, Any]) -> Completion | Exception:
        fields = {name: body[name] for name in _TAKEN if body.get(name) is not None}
        if isinstance(fields.get("prompt"), list):
            fields["prompt_token_ids"] = fields.pop("prompt")
        parsed = parse_request(orjson.dumps(fields))
        if parsed.error is not None:
            return parsed.error
        (prepared,) = self.engine.prepare([parsed.request])
        if not isinstance(prepared, Prepared):
            return prepared
        job_id = next(self._numbers)
        waiter = self._waiting[job_id] = asyncio.get_running_loop().create_future()
        self.engine.submit([Job(job_id, prepared, body.get("priority", 0))])
        try:
            completion: Completion = await waiter
        except RuntimeError as error:
            return error
        except asyncio.CancelledError:  # the client hung up
            self.cancelled += 1
            self._waiting.pop(job_id, None)
            self.engine.cancel([job_id])
            raise
        return completion if completion.error is None else completion.error

    async def _send(self, request: web.Request, made: Completion, fault: str) -> web.StreamResponse:
        usage = {
            "prompt_tokens": made.usage.prompt_tokens,
            "completion_tokens": made.usage.output_tokens,
            "prompt_tokens_details": {"cached_tokens": made.usage.cached_tokens},
        }
        answer: dict[str, Any] = {"object": "answer", "model": self.model, "choices": made.choices, "usage": usage}
        if fault == "no usage":
            del answer["usage"]
        if fault == "aborted":
            answer["choices"] = [choice | {"finish_reason": "abort"} for choice in made.choices or []]
        if fault == "garbage":
            return web.Response(body=b'{"choices": [{"index": 0, "te', content_type="application/json")
        if fault == "truncated":
            data = orjson.dumps(answer)
            stream = web.StreamResponse(headers={"Content-Length": str(len(data)), "Content-Type": "application/json"})
            await stream.prepare(request)
            await stream.write(data[: len(data) // 2])
            assert request.transport is not None
            request.transport.abort()
            return stream
        return _reply(answer)


def _reply(value: Any) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")


def _error(status: int, message: str, *, code: str = "", param: str | None = None, after: str = "") -> web.Response:
    error = {"message": message, "type": "error", "param": param, "code": code or status}
    headers = {"Retry-After": after} if after else {}
    return web.Response(
        status=status, body=orjson.dumps({"error": error}), content_type="application/json", headers=headers
    )


async def main(port: int) -> None:
    """Serves until it is killed; its engine takes a millisecond a token and obeys fault words."""
    engine = {"kind": "simulated", "simulated_faults": True, "simulated_step_ms": 1}
    endpoint = HttpEndpoint(contract_settings.build({"engine": engine}))
    endpoint.port = port
    await endpoint.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
