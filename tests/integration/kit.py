"""Small real parts for tests of the client: settings, and a responder that answers requests as a worker would."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import confluent_kafka as ck

from broker import config
from broker.publisher import Publisher
from contract import identity, messages
from contract import settings as contract_settings
from contract.messages import Request, Result, UsageBody
from contract.routing import Header
from contract.settings import Settings
from contract.statuses import Status

BACKENDS = ("confluent", "kafka-python")


def build(bootstrap_servers: str, prefix: str, backend: str, /, **tables: dict[str, Any]) -> Settings:
    """Few partitions, short time-outs; ``tables`` overlay."""
    base: dict[str, dict[str, Any]] = {
        "kafka": {
            "bootstrap_servers": bootstrap_servers,
            "session_timeout_ms": 6_000,
            "request_timeout_s": 10,
            "delivery_timeout_s": 60,
        },
        "topics": {"prefix": prefix, "partitions": 3, "reply_partitions": 3, "max_message_bytes": 100_000},
        "client": {"backend": backend, "max_unacknowledged": 500},
    }
    for name, table in tables.items():
        base[name] = base.get(name, {}) | table
    return contract_settings.build(base)


class Responder:
    """Answers every request on the request topics: the stored text is the prompt, reversed.

    ``answers`` may replace the result, or give None: no answer.
    """

    def __init__(self, settings: Settings, answers: Callable[[Request, Result], Result | None] | None = None) -> None:
        self._settings = settings
        self._answers = answers or (lambda _, result: result)
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.seen: list[ck.Message] = []

    def __enter__(self) -> Responder:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)

    def wait_for(self, count: int, timeout_s: float = 30) -> None:
        """Until ``count`` requests were seen."""
        deadline = time.monotonic() + timeout_s
        while len(self.seen) < count:
            assert time.monotonic() < deadline, f"{len(self.seen)} of {count}"
            time.sleep(0.01)

    def _run(self) -> None:
        names = self._settings.names
        consumer = ck.Consumer(config.consumer_config(self._settings, "responder"))
        topics = [
            t for c in self._settings.classes for t in names.requests("default", c, list(self._settings.buckets.edges))
        ]
        known = consumer.list_topics(timeout=20).topics
        consumer.assign(
            [ck.TopicPartition(t, p, ck.OFFSET_BEGINNING) for t in topics if t in known for p in known[t].partitions]
        )
        publisher = Publisher(self._settings)
        publisher.start()
        self._ready.set()
        while not self._stop.is_set():
            for message in consumer.consume(500, 0.05):
                if message.error() is None:
                    self.seen.append(message)
                    self._answer(publisher, message)
            publisher.poll()
        publisher.close(10)
        consumer.close()

    def _answer(self, publisher: Publisher, message: ck.Message) -> None:
        request, error, _ = messages.parse_request(message.value())
        key = identity.request_key(request.source, request.id or "")
        text = (request.input or "")[::-1]
        result = self._answers(
            request,
            Result(
                key=key,
                id=request.id,
                source=request.source,
                status=Status.OK if error is None else Status.INVALID,
                output={"choices": [{"index": 0, "text": text}]},
                usage=UsageBody(prompt_tokens=max(1, len(request.input or "") // 2)),
            ),
        )
        if result is None:
            return
        headers: list[tuple[str, bytes | None]] = [(Header.KEY, key.encode()), (Header.STATUS, result.status.encode())]
        value = messages.encode(result)
        publisher.publish(self._settings.names.results, key.encode(), value, headers)
        reply_to = dict(message.headers() or []).get(Header.REPLY_TO)
        if reply_to is not None:
            publisher.publish(self._settings.names.replies, key.encode(), value, headers, partition=int(reply_to))


def text_of(result: Result) -> str:
    """The responder's text."""
    assert result.output is not None
    return str(result.output["choices"][0]["text"])
