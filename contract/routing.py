"""Topic names, length buckets and the headers that let routing work without a parse."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

_WORD = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


class Header:
    """Names of the Kafka headers headrace writes. Values are UTF-8 text.

    Of two headers with one name the *last* wins, as Kafka's own ``Headers.lastHeader`` does. A
    header that cannot be read is as good as absent: it never loses a good request.
    """

    KEY = "hr-key"
    DEADLINE_MS = "hr-deadline-ms"
    """Absolute, milliseconds since the epoch."""
    TOKENS = "hr-tokens"
    """Estimated total tokens: prompt + what may be generated."""
    REPLY_TO = "hr-reply-to"
    """A partition of the replies topic."""
    STATUS = "hr-status"
    """On results and replies."""
    BUCKET_VERSION = "hr-bucket-version"
    """Version of the bucket edges the publisher used."""
    TRACEPARENT = "traceparent"


def is_word(text: str) -> bool:
    """Whether ``text`` may be a pool, class or bucket name: it becomes part of a topic and a label."""
    return _WORD.fullmatch(text) is not None


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """What a request topic's name says."""

    pool: str
    class_name: str
    bucket: str


@dataclasses.dataclass(frozen=True, slots=True)
class TopicNames:
    """All topic names of one installation: ``<prefix>.<pool>.<class>.<bucket>`` and four shared ones."""

    prefix: str

    @property
    def results(self) -> str:
        return f"{self.prefix}.results"

    @property
    def replies(self) -> str:
        return f"{self.prefix}.replies"

    @property
    def dead(self) -> str:
        return f"{self.prefix}.dead"

    @property
    def control(self) -> str:
        return f"{self.prefix}.control"

    def request(self, pool: str, class_name: str, bucket: str) -> str:
        return f"{self.prefix}.{pool}.{class_name}.{bucket}"

    def requests(self, pool: str, class_name: str, buckets: Sequence[str]) -> list[str]:
        """The topics that one class of one pool reads, shortest bucket first."""
        return [self.request(pool, class_name, bucket) for bucket in buckets]

    def parse(self, topic: str) -> Route | None:
        """The route of a request topic; None when ``topic`` is not one of ours."""
        if not topic.startswith(self.prefix + "."):
            return None
        parts = topic[len(self.prefix) + 1 :].split(".")
        return Route(*parts) if len(parts) == 3 else None


def bucket_of(total_tokens: int, edges: Mapping[str, int]) -> str:
    """The first bucket whose upper edge (inclusive, tokens) holds ``total_tokens``; else the last.

    ``edges`` runs from short to long. The bucket is a hint for scheduling only.
    """
    name = ""
    for name, upper in edges.items():
        if total_tokens <= upper:
            return name
    return name
