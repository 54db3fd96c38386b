"""One OpenAI-compatible endpoint over HTTP: questions, answers, and whether it lives.

The client library is aiohttp: 0.1–0.25 ms of CPU a request where httpx needs 4 (docs/decisions).
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any, Literal, NamedTuple

import aiohttp
import orjson

from contract.errors import FatalError
from contract.settings import Engine
from gpu_workers.engines import http_output
from gpu_workers.engines.http_params import CHAT, COMPLETIONS, Dialect

_KEEP_ALIVE_S = 4.0
"""uvicorn, vLLM's server, closes an idle connection after 5 s: never send on one that it is about to close."""
_CHECK_CONNECTIONS = 2
_CHECKS = 3
_BETWEEN_CHECKS_S = 0.25
_CHECK_PRIORITY = -1
"""Before every request of ours."""
_REFUSED = (401, 403)


Stage = Literal["connecting", "waiting", "answering"]
"""Of a question: the endpoint has not seen it; it was sent, and nothing came back; an answer had begun."""


class Reply(NamedTuple):
    """A whole HTTP answer."""

    status: int
    body: bytes
    retry_after_s: float | None

    @property
    def busy(self) -> bool:
        """Alive, but not now: 429, or a 503 that says when to come again."""
        return self.status == 429 or (self.status == 503 and self.retry_after_s is not None)


class Unreachable(Exception):
    """No whole answer, or one that says the endpoint itself is in trouble. ``str()`` tells which."""

    def __init__(self, text: str, again_s: float | None = None, *, stage: Stage = "answering") -> None:
        super().__init__(text)
        self.again_s = again_s
        """Set when it is alive but busy: when to ask again."""
        self.stage = stage
        """How far the question came."""


@dataclasses.dataclass(frozen=True, slots=True)
class Introduction:
    """What an endpoint lets us know about itself."""

    dialect: Dialect
    paths: tuple[str, ...]
    """The forms it serves, best first."""
    max_model_len: int | None


class Endpoint:
    """A connection pool to one endpoint. Loop thread; ``close`` it."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._url = engine.http_url.rstrip("/")
        self._model = model
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=engine.slots + _CHECK_CONNECTIONS, keepalive_timeout=_KEEP_ALIVE_S),
            # How long an answer may take is the worker's business: it cancels.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=engine.http_connect_timeout_s),
            headers={"Authorization": f"Bearer {engine.http_api_key}"} if engine.http_api_key else {},
        )
        self._introduction = Introduction("openai", (COMPLETIONS,), None)

    async def post(self, path: str, body: bytes) -> Reply:
        """The answer to one question, whatever its status. Raises ``Unreachable``."""
        return await self._ask("POST", path, body)

    async def _ask(self, method: str, path: str, body: bytes | None = None) -> Reply:
        stage: Stage = "waiting"
        try:
            async with self._session.request(
                method,
                f"{self._url}/{path}",
                data=body,
                headers={"Content-Type": "application/json"} if body else None,
                allow_redirects=False,
            ) as answer:
                stage = "answering"
                data = await answer.read()
                wait_s = http_output.retry_after_s(answer.headers.get("Retry-After"), time.time())
                return Reply(answer.status, data, wait_s)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            if isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)):
                stage = "connecting"
            raise Unreachable(text, stage=stage) from error

    # -- getting to know it -----------------------------------------------------------------------

    async def introduce(self) -> Introduction:
        """Finds out by small requests what the endpoint serves and understands.

        Raises ``Unreachable`` when it may answer later, ``FatalError`` when somebody has to change something.
        """
        cards = await self._cards()
        card = next((card for card in cards if card.get("id") == self._model), {})
        length = card.get("max_model_len")
        served: list[tuple[str, Dialect]] = []
        reasons = []
        for path in (COMPLETIONS, CHAT):
            dialects: tuple[Dialect, ...] = ("vllm", "openai")
            for dialect in dialects:
                reply = await self.post(path, self._one_token(path, dialect))
                if reply.status in _REFUSED:
                    raise FatalError(
                        f"{self._url} refuses the key ({http_output.explain(reply.status, reply.body)}); "
                        "set engine.http_api_key"
                    )
                if reply.busy:
                    raise Unreachable(http_output.explain(reply.status, reply.body), reply.retry_after_s or 1.0)
                if reply.status >= 500:
                    raise Unreachable(http_output.explain(reply.status, reply.body))
                if reply.status == 200:
                    served.append((path, dialect))
                    break
                reasons.append(f"/{path}: {http_output.explain(reply.status, reply.body)}")
        if not served:
            names = ", ".join(str(card.get("id")) for card in cards[:20])
            raise FatalError(
                f"{self._url} does not answer for model {self._model!r}: {reasons[0]} "
                f"({f'it serves {names}' if names else 'it lists no models'}); set engine.http_model to the model's "
                "name there, and engine.http_url to the base URL, which mostly ends in /v1"
            )
        dialect = "vllm" if all(one == "vllm" for _, one in served) else "openai"
        paths = tuple(path for path, _ in served)
        self._introduction = Introduction(dialect, paths, length if isinstance(length, int) else None)
        return self._introduction

    async def _cards(self) -> list[dict[str, Any]]:
        """The models it lists; none when it lists nothing."""
        reply = await self._ask("GET", "models")
        try:
            data = orjson.loads(reply.body)["data"]
            return [card for card in data if isinstance(card, dict)]
        except (ValueError, KeyError, TypeError):
            return []

    def _one_token(self, path: str, dialect: Dialect) -> bytes:
        body: dict[str, Any] = {"model": self._model, "max_tokens": 1}
        body |= {"messages": [{"role": "user", "content": "."}]} if path == CHAT else {"prompt": "."}
        if dialect == "vllm":
            body |= {"priority": _CHECK_PRIORITY, "top_k": 0, "ignore_eos": True}
        return orjson.dumps(body)

    # -- whether it lives -------------------------------------------------------------------------

    async def check(self, timeout_s: float) -> None:
        """A real round trip to the model: one token. Raises ``Unreachable`` when there is none to be had.

        Being busy is a sign of life. Silence is judged once, at ``timeout_s``; a refused connection or an
        error of the endpoint's own must repeat itself.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._check()
        except TimeoutError:
            raise Unreachable(f"no answer to one token within {timeout_s:g} s") from None

    async def _check(self) -> None:
        path, dialect = self._introduction.paths[0], self._introduction.dialect
        for left in reversed(range(_CHECKS)):
            try:
                reply = await self.post(path, self._one_token(path, dialect))
                if reply.status == 200 or reply.busy:
                    return
                raise Unreachable(http_output.explain(reply.status, reply.body))
            except Unreachable:
                if not left:
                    raise
            await asyncio.sleep(_BETWEEN_CHECKS_S)

    async def close(self) -> None:
        """Closes every connection; the endpoint gives up what was asked on them."""
        await self._session.close()
