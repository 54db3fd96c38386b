"""Either Kafka client library behind one page of promises. ``open`` alone knows the implementations.

One conformance suite runs over both (``tests/integration/test_backends.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

from broker.publisher import Failure
from broker.records import Record as Record
from contract.settings import Settings

Headers = list[tuple[str, bytes | None]]
Since = Literal["earliest", "latest"]
Done = Callable[[Failure | None], None]
"""Told once how a record's delivery ended: None is acknowledged. Must not raise nor block."""


class Producer(Protocol):
    """Idempotent, acks=all, partitions chosen by murmur2 of the key (a null key: at random)."""

    def produce(
        self,
        topic: str,
        key: bytes | None,
        value: bytes,
        headers: Headers,
        done: Done,
        partition: int | None = None,
    ) -> None:
        """Hands one record over; any thread. Never raises for the record's or the broker's fault. A record larger
        than ``topics.max_message_bytes`` fails alone, before it is sent.

        ``done`` is called once, on any thread, at the latest shortly after ``kafka.delivery_timeout_s``.
        It does not bound what is buffered: its caller does.
        """

    def partition_counts(self, timeout_s: float) -> Mapping[str, int]:
        """All topics and their numbers of partitions; makes no topic. Raises ``TransientError`` at the deadline."""

    def learn(self, topic: str) -> None:
        """Waits for what ``produce`` must know of a topic that exists. Without it the first ``produce`` may wait.

        Raises ``TransientError`` when no broker answers within ``kafka.request_timeout_s``.
        """

    def flush(self, timeout_s: float) -> bool:
        """Waits until every record handed over has ended; False at the deadline."""

    def close(self, timeout_s: float) -> None:
        """Flushes, gives up what is left (its ``done`` is told), frees everything. Twice is harmless."""


class Reader(Protocol):
    """Reads one topic or partition in order. One thread at a time."""

    def poll(self, timeout_s: float) -> list[Record]:
        """Records in order within each partition; waits up to ``timeout_s`` for the first.

        A broker that is away is waited for, call by call. Raises ``FatalError`` when the topic is gone or
        may not be read.
        """

    def at_end(self) -> bool:
        """Whether everything was polled that the topic held when reading began (in a group: at assignment)."""

    def done(self, record: Record) -> None:
        """In a group: the record is dealt with; committed within about a second, at the latest by ``close``."""

    def close(self) -> None:
        """Commits what is done and frees everything. Twice is harmless."""


class Backend(Protocol):
    """Makes producers and readers; each connects when it is made.

    All raise ``TransientError`` (``broker_unreachable``) when no broker answers within
    ``kafka.request_timeout_s``, ``SettingsError`` for a property the library refuses, ``FatalError`` when the
    topic is missing.
    """

    def producer(self) -> Producer: ...

    def read_partition(self, topic: str, partition: int) -> Reader:
        """Reads from the partition's end as it is when this returns. No group."""

    def read_topic(self, topic: str, since: Since, group: str | None) -> Reader:
        """Reads all partitions. Without ``group`` from where ``since`` says, as of this call; with it from what the
        group committed, else from ``since``.
        """


def open(settings: Settings) -> Backend:
    """The backend that ``client.backend`` names."""
    if settings.client.backend == "kafka-python":
        from producers.backends import kafka_python

        return kafka_python.KafkaPythonBackend(settings)
    from producers.backends import confluent

    return confluent.ConfluentBackend(settings)
