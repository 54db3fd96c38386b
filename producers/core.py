"""What ``Client`` and ``AsyncClient`` share: connecting, sending, awaiting replies, reading results.

Every method that may wait says so; the synchronous client calls it, the asynchronous one runs it in a
thread. All others return at once.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import orjson

from contract import identity, logs, messages
from contract import settings as contract_settings
from contract.errors import FatalError, HeadraceError, InvalidRequest, TransientError
from contract.messages import Request, Result
from contract.settings import Settings
from producers import backends
from producers.backends import Producer, Reader, Since
from producers.deliveries import Delivery, Gate, Stream
from producers.estimate import Estimator
from producers.prepare import Options, Prepared, Preparer, Ticket
from producers.replies import Replies, Slot

MOST_UNACKNOWLEDGED_BYTES = 128 * 2**20
_GRACE_S = 10.0
"""How much later than ``delivery_timeout_s`` a client library may tell of a record that was not delivered."""
_SLICE_S = 0.2


class Core:
    """One connection to one installation. Any thread."""

    def __init__(self, settings: Settings | None) -> None:
        self.settings = settings or contract_settings.load()
        self.delivery_wait_s = self.settings.kafka.delivery_timeout_s + _GRACE_S
        self.estimator = Estimator(self.settings)
        self._backend = backends.open(self.settings)
        self._preparer = Preparer(self.settings, self.estimator)
        self._gate = Gate(self.settings.client.max_unacknowledged, MOST_UNACKNOWLEDGED_BYTES)
        self._lock = threading.Lock()
        self._producer: Producer | None = None
        self._partitions: Mapping[str, int] = {}
        self._learnt: set[str] = set()
        self._replies: Replies | None = None
        self._closed = False
        self._log = logs.get("producers")

    # -- life -------------------------------------------------------------------------------------

    def is_open(self, *, reply: bool) -> bool:
        return self._producer is not None and (self._replies is not None or not reply)

    def open(self, *, reply: bool) -> None:
        """Connects, and with ``reply`` starts to read this client's reply partition. Twice is harmless.

        Waits at most a few ``kafka.request_timeout_s``. Raises ``TransientError`` when no broker answers,
        ``FatalError`` when topics are missing.
        """
        if self.is_open(reply=reply) and not self._closed:
            return
        with self._lock:
            if self._closed:
                raise FatalError("the client is closed")
            if self._producer is None:
                producer = self._backend.producer()
                try:
                    self._partitions = producer.partition_counts(self.settings.kafka.request_timeout_s)
                except BaseException:
                    producer.close(0)
                    raise
                self._producer = producer
            if reply and self._replies is None:
                count = self._partitions.get(self.settings.names.replies, 0)
                if not count:
                    raise _missing(self.settings.names.replies)
                replies = Replies(self.settings, self._backend, self.estimator, count)
                replies.start()
                self._replies = replies

    def close(self, timeout_s: float | None) -> None:
        """Waits up to ``timeout_s`` (None: the delivery timeout) for what is on its way, then frees everything."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._producer is not None:
            self._producer.close(self.settings.kafka.delivery_timeout_s if timeout_s is None else timeout_s)
        if self._replies is not None:
            self._replies.close(_GRACE_S)

    # -- sending ----------------------------------------------------------------------------------

    def prepare(self, request: Request | Mapping[str, Any], options: Options) -> Prepared:
        """The record of ``request``. Raises ``InvalidRequest``. ``open`` comes first."""
        if options.reply:
            assert self._replies is not None
            partition = self._replies.partition
        else:
            partition = None
        return self._preparer.prepare(request, options, time.time_ns() // 1_000_000, partition)

    def try_admit(self, prepared: Prepared) -> bool:
        """Takes room for one record; False when that needs a wait: then call ``admit``."""
        return prepared.ticket.topic in self._learnt and self._gate.try_take(prepared.size_bytes)

    def admit(self, prepared: Prepared) -> None:
        """Takes room for one record; waits at most the delivery timeout for others to be acknowledged.

        Raises ``FatalError`` when its topic does not exist, ``TransientError`` at the deadline.
        """
        if prepared.ticket.topic not in self._learnt:
            self._learn(prepared.ticket.topic)
        if not self._gate.take(prepared.size_bytes, self.delivery_wait_s):
            raise TransientError(
                f"{self._gate.taken} records are on their way and none was acknowledged within "
                f"{self.delivery_wait_s:g} s",
                code="delivery_failed",
            )

    def _learn(self, topic: str) -> None:
        producer = self._connected()
        if topic not in self._partitions:
            self._partitions = producer.partition_counts(self.settings.kafka.request_timeout_s)
            if topic not in self._partitions:
                raise _missing(topic)
        producer.learn(topic)
        self._learnt.add(topic)

    def send(
        self,
        prepared: Prepared,
        options: Options,
        index: int | None = None,
        waiter: Callable[[Delivery], object] | None = None,
    ) -> Delivery:
        """Hands an admitted record over. ``waiter`` is called on the backend's thread when it has ended."""
        delivery = Delivery(prepared.ticket, prepared.size_bytes, self._gate, index)
        delivery.waiter = waiter
        producer = self._connected()
        if options.reply and self._replies is not None:
            self._replies.box.expect(prepared.ticket.key, Slot(prepared))
        producer.produce(prepared.ticket.topic, prepared.key, prepared.value, prepared.headers, delivery.end)
        return delivery

    def send_one(self, prepared: Prepared, options: Options) -> concurrent.futures.Future[Ticket]:
        """Hands an admitted record over; the future ends when it is acknowledged or has failed."""
        future: concurrent.futures.Future[Ticket] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()  # a cancelled waiter does not stop a delivery

        def tell(delivery: Delivery) -> None:
            error = self.error_of(delivery)
            if error is None:
                future.set_result(prepared.ticket)
            else:
                future.set_exception(error)

        self.send(prepared, options, waiter=tell)
        return future

    def error_of(self, delivery: Delivery) -> HeadraceError | None:
        """What went wrong with a delivery that has ended; its result is then no longer awaited."""
        error = delivery.error()
        if error is not None and delivery.ticket is not None:
            self.taken(delivery.ticket)
        return error

    def silent(self) -> TransientError:
        """The error for a client library that breaks its promise to tell how a delivery ended."""
        return TransientError(
            f"the client library did not tell within {self.delivery_wait_s:g} s how a delivery ended",
            code="delivery_failed",
        )

    def stream(self) -> Stream:
        """For ``submit_many``."""
        return Stream(self.settings.client.max_unacknowledged)

    def _connected(self) -> Producer:
        if self._producer is None or self._closed:
            raise FatalError("the client is closed")
        return self._producer

    # -- results ----------------------------------------------------------------------------------

    def slot(self, ticket: Ticket | str) -> Slot:
        """Where the result of a request of this client arrives. Raises ``TransientError`` when it is not awaited."""
        slot = self._replies.box.awaits(self._key(ticket)) if self._replies is not None else None
        if slot is None:
            request_id = ticket if isinstance(ticket, str) else ticket.id
            raise TransientError(
                f"the result of request {request_id} is not awaited here: it was sent by another client or with "
                "reply=False, was taken already, or gave way to newer ones; read it with results() or in Postgres",
                code="reply_not_awaited",
            )
        return slot

    def taken(self, ticket: Ticket | str) -> None:
        """The caller has the result."""
        if self._replies is not None:
            self._replies.box.forget(self._key(ticket))

    def late(self, slot: Slot, timeout_s: float) -> TimeoutError:
        """The error of a result that did not come in time, with what is known."""
        assert self._replies is not None
        age_s = time.monotonic() - slot.asked_s
        return TimeoutError(
            f"no result of request {slot.id} within {timeout_s:.3g} s; sent to {slot.topic} {age_s:.1f} s ago; "
            f"{self._replies.state()}. It stays awaited."
        )

    def results(self, since: Since, group: str | None) -> Reader:
        """A reader of the results topic, positioned as of now. Waits as ``open`` does."""
        return self._backend.read_topic(self.settings.names.results, since, group)

    def read_results(self, reader: Reader, *, follow: bool) -> Iterator[Result | None]:
        """Results one by one, None whenever none came for a while; ends at the end unless ``follow``.

        A result counts as dealt with once the next thing is asked for.
        """
        while True:
            records = reader.poll(_SLICE_S)
            for record in records:
                try:
                    result = messages.parse_result(record.value or b"")
                except (msgspec.ValidationError, orjson.JSONDecodeError) as error:
                    where = f"{record.topic}/{record.partition}/{record.offset}"
                    self._log.warning("results.unreadable", record=where, error=str(error))
                else:
                    yield result
                reader.done(record)
            if not records:
                if not follow and reader.at_end():
                    return
                yield None

    def _key(self, ticket: Ticket | str) -> str:
        if isinstance(ticket, str):
            return identity.request_key(self.settings.client.source, messages.clean_surrogates(ticket))
        return ticket.key


def given(request: Request | Mapping[str, Any] | None, fields: Mapping[str, Any]) -> Request | Mapping[str, Any]:
    """The request of a call that takes it whole or as fields, not both."""
    if request is None:
        return fields
    if fields:
        raise InvalidRequest(f"give a request or fields, not both: {', '.join(fields)}")
    return request


def _missing(topic: str) -> FatalError:
    return FatalError(f"topic {topic} does not exist: run `headrace topics create`")
