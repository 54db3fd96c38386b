"""Whether the run kept its promises: nothing lost, nothing doubled, everything adds up."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from headrace.demo.tally import Tally
from storage.reconcile import Finding, reconcile
from storage.store import Store

_KEYS_AT_ONCE = 1_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Ids of requests that were lost or doubled, and what does not add up. All empty: the run is sound."""

    published: int
    lost: list[str]
    """Acknowledged by the broker, but without an outcome in the database."""
    unpublished: list[str]
    """Settled, but their result never came on the results topic."""
    doubled: list[str]
    """Two different results on the topic, or run a second time as another generation."""
    findings: list[Finding]
    """Of the ledger, double charges among them."""

    @property
    def sound(self) -> bool:
        return not (self.lost or self.unpublished or self.doubled or self.findings)


def judge(store: Store, tally: Tally) -> Verdict:
    """Compares what was published with what the database and the results topic hold."""
    generations: dict[str, int] = {}
    for keys in _chunks(iter(tally.published)):
        generations |= {key: row.generation for key, row in store.stored_results(keys).items()}
    doubled = tally.conflicting | {key for key, generation in generations.items() if generation > 1}
    names = tally.published
    return Verdict(
        published=len(names),
        lost=[name for key, name in names.items() if key not in generations],
        unpublished=[name for key, name in names.items() if key in generations and key not in tally.seen],
        doubled=[names.get(key, key) for key in sorted(doubled)],
        findings=reconcile(store),
    )


def _chunks(keys: Iterator[str]) -> Iterator[list[str]]:
    while chunk := list(itertools.islice(keys, _KEYS_AT_ONCE)):
        yield chunk
