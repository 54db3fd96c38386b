"""Requests as the client writes them, published before anything is measured."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import confluent_kafka as ck

from broker import config
from broker.records import Headers
from contract import identity
from contract.routing import Header
from contract.settings import Settings
from producers.estimate import Estimator
from producers.prepare import Options, Preparer
from tests.acceptance.harness import World

VALUE_BYTES = 300
MAX_TOKENS = 16
_SOURCE = "bench"
_ZERO = "0000000"
_TEXT = "which of these departments should answer this letter? " * 8
_FULL_S = 0.1
_FLUSH_S = 60.0


class Record(NamedTuple):
    """One request as it is published."""

    topic: str
    key: bytes
    value: bytes
    headers: Headers


def requests(settings: Settings, count: int, class_name: str, max_tokens: int = MAX_TOKENS) -> Iterator[Record]:
    """``count`` requests of 300 B from a client that waits for no replies, ids ``r-0000000…``. Always the same.

    The client writes the first; the others differ from it in number and key alone, which is a hundred times faster.
    """
    fields = {"source": _SOURCE, "business_line": "search", "type": "classify", "max_tokens": max_tokens}
    preparer, now_ms = Preparer(settings, Estimator(settings)), int(time.time() * 1000)

    def prepare(text: str) -> Record:
        request = {"id": f"r-{_ZERO}", "prompt": f"{_ZERO} {text}", **fields}
        one = preparer.prepare(request, Options(class_name=class_name, reply=False), now_ms, None)
        return Record(one.ticket.topic, one.key, one.value, one.headers)

    first = prepare(_TEXT[: VALUE_BYTES - len(prepare("").value)])
    rest = [header for header in first.headers if header[0] != Header.KEY]
    for place in range(count):
        number = f"{place:07}"
        key = identity.request_key(_SOURCE, f"r-{number}").encode()
        value = first.value.replace(_ZERO.encode(), number.encode())
        yield Record(first.topic, key, value, [(Header.KEY, key), *rest])


def publish(world: World, count: int, class_name: str = "offline", max_tokens: int = MAX_TOKENS) -> str:
    """Publishes ``requests`` to ``world``; all are acknowledged when it returns. Returns their topic."""
    failed: list[object] = []
    producer = ck.Producer(config.producer_config(world.settings) | {"linger.ms": 20})

    def note(error: object, _message: object) -> None:
        if error is not None:
            failed.append(error)

    topic = ""
    for topic, key, value, headers in requests(world.settings, count, class_name, max_tokens):
        while True:
            try:
                producer.produce(topic, value, key, headers=headers, on_delivery=note)
                break
            except BufferError:
                producer.poll(_FULL_S)
        producer.poll(0)
    if producer.flush(_FLUSH_S) or failed:
        raise RuntimeError(f"not all of {count} requests could be published: {failed[:3]}")
    return topic
