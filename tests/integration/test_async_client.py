"""The same promises, awaited."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from broker import topics
from contract.errors import InvalidRequest, TransientError
from contract.settings import Settings
from headrace import AsyncClient
from tests.integration.kit import BACKENDS, Responder, build, text_of
from tests.integration.test_client import publish_results


@pytest.fixture(params=BACKENDS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def client_settings(kafka: str, topic_prefix: str, name: str) -> Settings:
    settings = build(kafka, topic_prefix, name)
    topics.ensure(settings)
    return settings


async def test_many_at_once_each_get_their_own_result(client_settings: Settings) -> None:
    async def ask(client: AsyncClient, text: str) -> str:
        return text_of(await client.result(await client.submit(input=text), timeout_s=60))

    with Responder(client_settings):
        async with AsyncClient(client_settings) as client:
            texts = [f"text {n}" for n in range(300)]
            assert await asyncio.gather(*(ask(client, text) for text in texts)) == [text[::-1] for text in texts]


async def test_loop_turns_while_the_client_connects_and_streams(client_settings: Settings) -> None:
    longest, last, stop = 0.0, time.monotonic(), False

    async def beat() -> None:
        nonlocal longest, last
        while not stop:
            await asyncio.sleep(0.005)
            now = time.monotonic()
            longest, last = max(longest, now - last), now

    heart = asyncio.create_task(beat())
    async with AsyncClient(client_settings) as client:
        count = 0
        async for _ in client.submit_many({"input": "x", "max_tokens": 1} for _ in range(3_000)):
            count += 1
    stop = True
    await heart
    assert count == 3_000
    assert longest < 1.0  # a blocked loop would stand still for the whole stream


async def test_stream_takes_an_asynchronous_iterator_and_keeps_order(client_settings: Settings) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for number in range(1_200):
            if number % 100 == 0:
                await asyncio.sleep(0)
            yield {"id": str(number), "input": 5 if number == 7 else "x", "max_tokens": 1}

    told: list[int] = []
    async with AsyncClient(client_settings) as client:
        stream = client.submit_many(requests(), on_error=lambda index, _: told.append(index))
        ids = [ticket.id async for ticket in stream]
        assert ids == [str(n) for n in range(1_200) if n != 7]
        assert told == [7]
        with pytest.raises(InvalidRequest, match="item 7"):
            async for _ in client.submit_many(requests()):
                pass


async def test_late_result_is_a_timeout_and_a_cancelled_wait_does_not_take_it(client_settings: Settings) -> None:
    async with AsyncClient(client_settings) as client:
        ticket = await client.submit(input="abc")
        with pytest.raises(TimeoutError, match=ticket.id):
            await client.result(ticket, timeout_s=0.1)
        waiting = asyncio.create_task(client.result(ticket, timeout_s=60))
        await asyncio.sleep(0)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        with Responder(client_settings):
            assert text_of(await client.result(ticket, timeout_s=30)) == "cba"


async def test_results_are_streamed_and_the_reader_is_closed(client_settings: Settings, topic_prefix: str) -> None:
    publish_results(client_settings, [str(n) for n in range(5)])
    group = f"{topic_prefix}-group"
    async with AsyncClient(client_settings) as client:
        found = [result.id async for result in client.results(since="earliest", follow=False)]
        assert found == ["0", "1", "2", "3", "4"]
        stream = client.results(since="earliest", group=group)
        assert [(await anext(stream)).id for _ in range(2)] == ["0", "1"]
        await stream.aclose()
        rest = [result.id async for result in client.results(since="earliest", group=group, follow=False)]
        assert rest == ["1", "2", "3", "4"]


async def test_broker_that_is_not_there_is_one_clear_error_in_time() -> None:
    async with AsyncClient(build("127.0.0.1:9", "p", "confluent", kafka={"request_timeout_s": 1})) as client:
        begun = time.monotonic()
        with pytest.raises(TransientError, match=r"127\.0\.0\.1:9"):
            await client.submit(input="x")
        assert time.monotonic() - begun < 5
