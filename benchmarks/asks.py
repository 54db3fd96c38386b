"""Requests of mixed lengths for real engines, and their publication beforehand. The same count, the same requests."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import confluent_kafka as ck

from broker import config
from producers.estimate import Estimator
from producers.prepare import Options, Preparer
from tests.acceptance.harness import World

SOURCE = "bench"
_WORDS = ("river", "water", "wheel", "mill", "gate", "stone", "field", "grain", "flour", "light", "rain", "bridge")
_FLUSH_S = 60.0


class Ask(NamedTuple):
    """One request: greedy, and always exactly ``max_tokens`` long, so that every contender makes the same tokens."""

    id: str
    text: str
    max_tokens: int

    def prompt(self) -> dict[str, Any]:
        """As a request with the text as it is."""
        return {"prompt": self.text, **self._common()}

    def chat(self) -> dict[str, Any]:
        """As a chat."""
        return {"messages": [{"role": "user", "content": self.text}], **self._common()}

    def _common(self) -> dict[str, Any]:
        fields = {"id": self.id, "source": SOURCE, "business_line": "search", "type": "answer"}
        return fields | {"max_tokens": self.max_tokens, "temperature": 0, "ignore_eos": True}


class Kind(NamedTuple):
    """A length: how many of a hundred, words of the prompt (about five tokens each), tokens of the answer."""

    percent: int
    words: tuple[int, int]
    max_tokens: tuple[int, int]


OFFLINE = (Kind(70, (5, 20), (8, 24)), Kind(25, (40, 90), (24, 64)), Kind(5, (60, 120), (128, 192)))
TALL = (Kind(80, (5, 20), (8, 16)), Kind(20, (5, 20), (256, 256)))
"""Lengths that hurt a closed batch: four short answers for each long one."""
ONLINE = (Kind(100, (4, 16), (24, 40)),)


def make(kinds: Sequence[Kind], count: int, prefix: str = "r") -> list[Ask]:
    """``count`` requests; of every hundred in a row, each kind has exactly its share."""
    rng = random.Random(f"{kinds} {prefix}")
    deck: list[Kind] = []
    asks = []
    for number in range(count):
        if not deck:
            deck = [kind for kind in kinds for _ in range(kind.percent)]
            rng.shuffle(deck)
        kind = deck.pop()
        text = f"{number} " + " ".join(rng.choices(_WORDS, k=rng.randint(*kind.words)))
        asks.append(Ask(f"{prefix}-{number:05}", text, rng.randint(*kind.max_tokens)))
    return asks


def write(file: Path, lines: Iterable[dict[str, Any]]) -> Path:
    """One JSON object a line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def publish(world: World, requests: Sequence[dict[str, Any]], class_name: str, bucket: str | None = None) -> None:
    """As the client writes them; all are acknowledged when it returns. ``bucket``: None: each by its length."""
    preparer, now_ms = Preparer(world.settings, Estimator(world.settings)), int(time.time() * 1_000)
    options = Options(class_name=class_name, bucket=bucket, reply=False)
    failed: list[object] = []
    producer = ck.Producer(config.producer_config(world.settings))
    for request in requests:
        one = preparer.prepare(request, options, now_ms, None)
        producer.produce(
            one.ticket.topic, one.value, one.key, headers=one.headers,
            on_delivery=lambda error, _: failed.append(error) if error else None,
        )  # fmt: skip
    if producer.flush(_FLUSH_S) or failed:
        raise RuntimeError(f"not all of {len(requests)} requests could be published: {failed[:3]}")


def gaps_s(per_s: float, seed: str) -> Iterator[float]:
    """Times between Poisson arrivals."""
    rng = random.Random(seed)
    while True:
        yield rng.expovariate(per_s)
