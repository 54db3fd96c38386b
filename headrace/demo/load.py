"""What the demo asks: requests of varied length from several business lines. Pure; the same seed, the same load."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

from contract.messages import Request

ONLINE = "online"
OFFLINE = "offline"
DEADLINE_S = 30.0
"""Of online requests."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much of everything."""

    online_s: float = 60.0
    """How long online requests arrive."""
    online_per_s: float = 8.0
    """Mean of their Poisson arrivals."""
    offline_requests: int = 1_200
    """Lines of the offline file."""
    light_per_s: float = 2.0
    """Online arrivals after the load, while the demo keeps running."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Kind:
    """A length: share of requests, words of the prompt, most tokens of the answer."""

    share: float
    words: tuple[int, int]
    max_tokens: tuple[int, int]


# A word is about five tokens of the tiny model's tokenizer. The last kind fills the bucket "long".
_KINDS = {
    ONLINE: (_Kind(0.80, (4, 16), (8, 32)), _Kind(0.17, (40, 90), (32, 96)), _Kind(0.03, (180, 220), (128, 256))),
    OFFLINE: (_Kind(0.70, (5, 20), (16, 48)), _Kind(0.25, (50, 120), (32, 128)), _Kind(0.05, (180, 220), (128, 256))),
}
_LINES = {
    ONLINE: (("search", "chat", 5), ("support", "chat", 3), ("ads", "classify", 2)),
    OFFLINE: (("archive", "summary", 3), ("catalogue", "extract", 2)),
}
_WORDS = ("river", "water", "wheel", "mill", "gate", "stone", "field", "grain", "flour", "light", "rain", "bridge")
_POLICY = "You answer customers of the mill. Be brief and exact. Name the gate, the wheel and the hour. " * 2
"""Shared by all requests of the line ``support``: the engine's prefix cache meets it again and again."""


class Load:
    """Requests of one run. ``source`` owns their ids, so that runs never meet."""

    def __init__(self, source: str, seed: int = 0) -> None:
        self._source = source
        self._random = {class_name: random.Random(f"{seed} {class_name}") for class_name in (ONLINE, OFFLINE)}
        self._made = {ONLINE: 0, OFFLINE: 0}

    def request(self, class_name: str) -> Request:
        """The next request of a class."""
        rng = self._random[class_name]
        number = self._made[class_name] = self._made[class_name] + 1
        kinds, lines = _KINDS[class_name], _LINES[class_name]
        kind = rng.choices(kinds, [kind.share for kind in kinds])[0]
        line, work, _ = rng.choices(lines, [weight for _, _, weight in lines])[0]
        text = " ".join(rng.choices(_WORDS, k=rng.randint(*kind.words)))
        request = Request(
            id=f"{class_name}-{number:06d}",
            source=self._source,
            business_line=line,
            type=work,
            max_tokens=rng.randint(*kind.max_tokens),
            temperature=0.8,
            seed=number,
        )
        if class_name == OFFLINE:
            request.prompt, request.batch_id, request.custom_id = text, f"{self._source}-file", f"line-{number}"
        elif line == "support":
            request.messages = [{"role": "system", "content": _POLICY}, {"role": "user", "content": text}]
        else:
            request.input = text
        return request

    def gaps_s(self, per_s: float) -> Iterator[float]:
        """Times between Poisson arrivals of a mean rate."""
        while True:
            yield self._random[ONLINE].expovariate(per_s)
