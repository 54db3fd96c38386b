"""The publishing library: ``Client``, and ``AsyncClient`` for asyncio, over one core.

::

    with Client() as client:
        ticket = client.submit(input="Say hello.", max_tokens=20)
        result = client.result(ticket, timeout_s=30)
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

from contract.errors import HeadraceError, InvalidRequest
from contract.messages import Request, Result
from contract.settings import Settings
from producers.backends import Since
from producers.core import Core, given
from producers.deliveries import Delivery, Stream
from producers.prepare import Options, Ticket

OnError = Callable[[int, HeadraceError], None]
"""Told the place in the input (from 0) and the error of an item that was not delivered."""

_TURN_ITEMS = 100
"""After so many items the asynchronous client lets the event loop turn."""


class Client:
    """Publishes requests and reads results. Thread-safe. Connects at first use.

    Args:
        settings: None reads ``headrace.toml`` and the environment.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self._core = Core(settings)

    def submit(
        self,
        request: Request | Mapping[str, Any] | None = None,
        /,
        *,
        pool: str | None = None,
        class_name: str | None = None,
        bucket: str | None = None,
        deadline_s: float | None = None,
        reply: bool = True,
        traceparent: str | None = None,
        **fields: Any,
    ) -> Ticket:
        """Publishes one request (whole, or as ``fields``); returns when all in-sync copies have it.

        Args:
            deadline_s: from now; stands above the request's own deadline.
            reply: False: nobody here will ask ``result`` for it.

        Raises:
            InvalidRequest: wrong or too large (code ``too_large``); nothing was sent.
            DeliveryFailed: not acknowledged within ``kafka.delivery_timeout_s``; a ``TransientError``.
            TransientError: no broker answers (``broker_unreachable``).
            FatalError: topics are missing, or the broker refuses.
        """
        options = Options(
            pool=pool, class_name=class_name, bucket=bucket, deadline_s=deadline_s, reply=reply, traceparent=traceparent
        )
        self._core.open(reply=reply)
        prepared = self._core.prepare(given(request, fields), options)
        if not self._core.try_admit(prepared):
            self._core.admit(prepared)
        future = self._core.send_one(prepared, options)
        try:
            return future.result(self._core.delivery_wait_s)
        except concurrent.futures.TimeoutError:
            raise self._core.silent() from None

    def submit_many(
        self,
        requests: Iterable[Request | Mapping[str, Any]],
        /,
        *,
        pool: str | None = None,
        class_name: str | None = None,
        bucket: str | None = None,
        deadline_s: float | None = None,
        reply: bool = False,
        on_error: OnError | None = None,
    ) -> Generator[Ticket, None, None]:
        """Publishes a stream of requests; yields a ticket for each, in order, once all in-sync copies have it.

        Takes from ``requests`` only as fast as the broker acknowledges: at most
        ``client.max_unacknowledged`` are in memory. Nothing is sent before the first ``next``.

        Args:
            on_error: told of each item that is invalid or was not delivered, and the stream goes on. None: the
                first such item raises, named by its place; those before it are delivered, of those after it some
                may be (submit them again under the same ids).

        Raises:
            As ``submit``; a broker that goes away ends the stream with ``DeliveryFailed``.
        """
        options = Options(pool=pool, class_name=class_name, bucket=bucket, deadline_s=deadline_s, reply=reply)
        self._core.open(reply=reply)
        stream = self._core.stream()
        for index, request in enumerate(requests):
            stream.add(self._send(request, options, index))
            yield from _tickets(self._core, stream, on_error)
            while stream.full:
                if not stream.wait(self._core.delivery_wait_s):
                    raise self._core.silent()
                yield from _tickets(self._core, stream, on_error)
        while stream:
            if not stream.wait(self._core.delivery_wait_s):
                raise self._core.silent()
            yield from _tickets(self._core, stream, on_error)

    def _send(self, request: Request | Mapping[str, Any], options: Options, index: int) -> Delivery:
        try:
            prepared = self._core.prepare(request, options)
        except InvalidRequest as error:
            return _never_sent(error, index)
        if not self._core.try_admit(prepared):
            self._core.admit(prepared)
        return self._core.send(prepared, options, index)

    def result(self, ticket: Ticket | str, timeout_s: float) -> Result:
        """The result of a request this client submitted with ``reply=True``; once.

        ``ticket`` may be the request's id when its source is ``client.source``.

        Raises:
            TimeoutError: with what is known; it stays awaited, ask again.
            TransientError: ``reply_not_awaited``; read it with ``results`` or in Postgres.
        """
        slot = self._core.slot(ticket)
        try:
            result = slot.future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            raise self._core.late(slot, timeout_s) from None
        self._core.taken(ticket)
        return result

    def results(
        self, since: Since = "latest", group: str | None = None, *, follow: bool = True
    ) -> Generator[Result, None, None]:
        """All results of the installation, as a stream from the results topic.

        Args:
            since: where to begin, as of this call; with ``group`` only if the group has committed nothing.
            group: readers of one group share the stream. A result is committed after the next one is asked
                for, so one that was not dealt with comes again after a crash.
            follow: False: end where the topic ended at the start.
        """
        reader = self._core.results(since, group)

        def stream() -> Generator[Result, None, None]:
            try:
                for result in self._core.read_results(reader, follow=follow):
                    if result is not None:
                        yield result
            finally:
                reader.close()

        return stream()

    def close(self, timeout_s: float | None = None) -> None:
        """Waits up to ``timeout_s`` (None: the delivery timeout) for what is on its way. Twice is harmless."""
        self._core.close(timeout_s)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """``Client`` for asyncio: the same methods, promises and errors, awaited. What may wait never blocks the loop."""

    def __init__(self, settings: Settings | None = None) -> None:
        self._core = Core(settings)

    async def submit(
        self,
        request: Request | Mapping[str, Any] | None = None,
        /,
        *,
        pool: str | None = None,
        class_name: str | None = None,
        bucket: str | None = None,
        deadline_s: float | None = None,
        reply: bool = True,
        traceparent: str | None = None,
        **fields: Any,
    ) -> Ticket:
        """See ``Client.submit``. A cancelled call may have published its request."""
        options = Options(
            pool=pool, class_name=class_name, bucket=bucket, deadline_s=deadline_s, reply=reply, traceparent=traceparent
        )
        await self._open(reply)
        prepared = self._core.prepare(given(request, fields), options)
        if not self._core.try_admit(prepared):
            await asyncio.to_thread(self._core.admit, prepared)
        future = asyncio.wrap_future(self._core.send_one(prepared, options))
        try:
            return await asyncio.wait_for(future, self._core.delivery_wait_s)
        except TimeoutError:
            raise self._core.silent() from None

    async def submit_many(
        self,
        requests: Iterable[Request | Mapping[str, Any]] | AsyncIterator[Request | Mapping[str, Any]],
        /,
        *,
        pool: str | None = None,
        class_name: str | None = None,
        bucket: str | None = None,
        deadline_s: float | None = None,
        reply: bool = False,
        on_error: OnError | None = None,
    ) -> AsyncGenerator[Ticket, None]:
        """See ``Client.submit_many``. ``requests`` may be an asynchronous iterator."""
        options = Options(pool=pool, class_name=class_name, bucket=bucket, deadline_s=deadline_s, reply=reply)
        await self._open(reply)
        stream = self._core.stream()
        async for index, request in _enumerate(requests):
            stream.add(await self._send(request, options, index))
            for ticket in _tickets(self._core, stream, on_error):
                yield ticket
            while stream.full:
                if not await asyncio.to_thread(stream.wait, self._core.delivery_wait_s):
                    raise self._core.silent()
                for ticket in _tickets(self._core, stream, on_error):
                    yield ticket
        while stream:
            if not await asyncio.to_thread(stream.wait, self._core.delivery_wait_s):
                raise self._core.silent()
            for ticket in _tickets(self._core, stream, on_error):
                yield ticket

    async def _send(self, request: Request | Mapping[str, Any], options: Options, index: int) -> Delivery:
        try:
            prepared = self._core.prepare(request, options)
        except InvalidRequest as error:
            return _never_sent(error, index)
        if not self._core.try_admit(prepared):
            await asyncio.to_thread(self._core.admit, prepared)
        return self._core.send(prepared, options, index)

    async def result(self, ticket: Ticket | str, timeout_s: float) -> Result:
        """See ``Client.result``."""
        slot = self._core.slot(ticket)
        try:
            result = await asyncio.wait_for(asyncio.wrap_future(slot.future), timeout_s)
        except TimeoutError:
            raise self._core.late(slot, timeout_s) from None
        self._core.taken(ticket)
        return result

    async def results(
        self, since: Since = "latest", group: str | None = None, *, follow: bool = True
    ) -> AsyncGenerator[Result, None]:
        """See ``Client.results``; begins where the topic is at the first step, not at the call."""
        # One thread of its own: a reader may not be used by two at a time.
        with concurrent.futures.ThreadPoolExecutor(1, "headrace-results") as thread:
            loop = asyncio.get_running_loop()
            reader = await loop.run_in_executor(thread, self._core.results, since, group)
            found = self._core.read_results(reader, follow=follow)
            try:
                while (result := await loop.run_in_executor(thread, _next, found)) is not _END:
                    if isinstance(result, Result):
                        yield result
            finally:
                await asyncio.shield(loop.run_in_executor(thread, reader.close))

    async def close(self, timeout_s: float | None = None) -> None:
        """See ``Client.close``."""
        await asyncio.to_thread(self._core.close, timeout_s)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _open(self, reply: bool) -> None:
        if not self._core.is_open(reply=reply):
            await asyncio.to_thread(self._core.open, reply=reply)


_END = object()


def _next(results: Iterator[Result | None]) -> object:
    return next(results, _END)


def _never_sent(error: InvalidRequest, index: int) -> Delivery:
    delivery = Delivery(None, 0, None, index)
    delivery.invalid = error
    delivery.ended = True
    return delivery


def _tickets(core: Core, stream: Stream, on_error: OnError | None) -> Iterator[Ticket]:
    for delivery in stream.ready():
        error = core.error_of(delivery)
        if error is not None:
            if on_error is None:
                raise error
            on_error(delivery.index or 0, error)
        elif delivery.ticket is not None:
            yield delivery.ticket


async def _enumerate(
    requests: Iterable[Request | Mapping[str, Any]] | AsyncIterator[Request | Mapping[str, Any]],
) -> AsyncIterator[tuple[int, Request | Mapping[str, Any]]]:
    if isinstance(requests, AsyncIterator):
        index = 0
        async for request in requests:
            yield index, request
            index += 1
        return
    for index, request in enumerate(requests):
        if index % _TURN_ITEMS == 0:
            await asyncio.sleep(0)
        yield index, request
