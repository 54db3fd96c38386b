"""Reading and replaying dead letters: which are meant, how one is tried again."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator

from broker.publisher import FailureKind, Publisher
from broker.reader import Reader
from broker.records import Record
from consumers import dead_letters
from consumers.dead_letters import DeadLetterView, Place
from consumers.item import Headers
from contract.errors import TransientError
from contract.settings import Settings

_MOST_UNACKNOWLEDGED = 1_000
_MOST_UNACKNOWLEDGED_BYTES = 32 * 2**20
_SLICE_S = 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class Filter:
    """Which letters are meant. Of each field one of its values must be met; an empty one meets all."""

    reasons: frozenset[str] = frozenset()
    topics: frozenset[str] = frozenset()
    """Topics the records came from."""
    ids: frozenset[str] = frozenset()
    """Publishers' ids."""
    keys: frozenset[str] = frozenset()
    """headrace's keys of requests, or the records' own keys."""
    since_ms: int | None = None
    until_ms: int | None = None
    """Exclusive."""

    def __bool__(self) -> bool:
        return self != Filter()

    def takes(self, letter: DeadLetterView) -> bool:
        origin = letter.origin.topic if letter.origin else ""
        id = letter.request.id if letter.request else None
        return (
            (not self.reasons or letter.reason in self.reasons)
            and (not self.topics or origin in self.topics)
            and (not self.ids or id in self.ids)
            and (self.since_ms is None or letter.at_ms >= self.since_ms)
            and (self.until_ms is None or letter.at_ms < self.until_ms)
            and (not self.keys or not self.keys.isdisjoint({letter.request_key, letter.key_text}))
        )


class DeadLetters:
    """The dead topic and, beside it, the topics its letters came from. Raises as ``broker.reader.Reader`` does."""

    def __init__(self, settings: Settings) -> None:
        self._names = settings.names
        self._letters = Reader(settings)
        self._originals = Reader(settings)

    def letters(self, wanted: Filter) -> Iterator[DeadLetterView]:
        """Those that stand there now, oldest first within each partition."""
        for record in self._letters.records(self._names.dead):
            letter = dead_letters.read(record)
            if wanted.takes(letter):
                yield letter

    def letter(self, partition: int, offset: int) -> DeadLetterView | None:
        """The letter at one place; None: none stands there."""
        record = self._letters.record(self._names.dead, partition, offset)
        return None if record is None else dead_letters.read(record)

    def original(self, letter: DeadLetterView) -> Record | None:
        """The record a letter with a cut payload tells of; None: it is gone from its topic."""
        if letter.origin is None:
            return None
        record = self._originals.record(*letter.origin)
        # A topic that was deleted and made anew has other records at the same places.
        same = record is not None and len(record.value or b"") == letter.cut_bytes
        return record if same else None

    def why_not(self, letter: DeadLetterView) -> str | None:
        """Why a letter cannot go back where it came from; None: it can."""
        origin = letter.origin
        if origin is None:
            return "it does not say which topic it came from"
        if self._names.parse(origin.topic) is None:
            return f"{origin.topic} is no request topic of this installation (topics.prefix)"
        if not self._originals.partitions(origin.topic):
            return f"there is no topic {origin.topic} any more"
        return None

    def close(self) -> None:
        self._letters.close()
        self._originals.close()


class Replay:
    """Publishes letters to the topics they came from, acknowledged; at most 1,000 or 32 MiB on their way.

    Of several letters of one request only the first goes: it is one request. Not for use by two threads.

    Args:
        publisher: started; None: nothing is published, everything else is as it would be.
        replayed: told each letter that is acknowledged.
        refused: told each letter that cannot be replayed, and why.
    """

    def __init__(
        self,
        letters: DeadLetters,
        publisher: Publisher | None,
        *,
        replayed: Callable[[DeadLetterView], None],
        refused: Callable[[DeadLetterView, str], None],
    ) -> None:
        self._letters = letters
        self._publisher = publisher
        self._replayed = replayed
        self._refused = refused
        self._on_their_way: dict[Place, int] = {}
        self._bytes = 0
        self._keys: set[str] = set()
        self.left_out: collections.Counter[str] = collections.Counter()
        """Why letters that were not refused did not go either."""

    def run(self, letters: Iterable[DeadLetterView], *, named: bool, limit: int | None = None) -> None:
        """Replays ``letters`` in order, ``limit`` at most; returns when all that went are acknowledged.

        ``named``: they were chosen one by one; then also those without a readable request go.

        Raises ``TransientError`` when the broker goes away; what was acknowledged has been told.
        """
        went = 0
        for letter in letters:
            if went == limit:
                break
            if self._take(letter, named):
                went += 1
            while len(self._on_their_way) >= _MOST_UNACKNOWLEDGED or self._bytes >= _MOST_UNACKNOWLEDGED_BYTES:
                self._note_deliveries()
        while self._on_their_way:
            self._note_deliveries()

    def _take(self, letter: DeadLetterView, named: bool) -> bool:
        """Whether it went."""
        if letter.unreadable and not named:
            self.left_out["without a readable request, to be named by PLACE"] += 1
            return False
        if letter.request_key and letter.request_key in self._keys:
            self.left_out["further letters of the same request"] += 1
            return False
        if (why := self._letters.why_not(letter)) is not None:
            self._refused(letter, why)
            return False
        key, value, headers = letter.key, letter.value, letter.headers
        if letter.cut_bytes is not None:
            original = self._letters.original(letter)
            if original is None:
                self._refused(
                    letter, f"its payload of {letter.cut_bytes} bytes was cut, and the original {letter.origin} is gone"
                )
                return False
            key, value, headers = original.key, original.value, original.headers
        self._keys.add(letter.request_key)
        self._publish(letter, key, *dead_letters.to_replay(value, headers, int(time.time() * 1000)))
        return True

    def _publish(self, letter: DeadLetterView, key: bytes | None, value: bytes | None, headers: Headers) -> None:
        assert letter.origin is not None
        if self._publisher is None:
            self._replayed(letter)
            return
        self._on_their_way[letter.at] = len(value or b"")
        self._bytes += len(value or b"")
        self._publisher.publish(letter.origin.topic, key, value, headers, token=letter)

    def _note_deliveries(self) -> None:
        assert self._publisher is not None
        acknowledged, failures = self._publisher.poll(_SLICE_S)
        for letter in acknowledged:
            self._bytes -= self._on_their_way.pop(letter.at)
            self._replayed(letter)
        for failure in failures:
            self._bytes -= self._on_their_way.pop(failure.token.at)
            if failure.kind not in (FailureKind.TOO_LARGE, FailureKind.REFUSED):
                raise TransientError(f"{failure.token.place} was not acknowledged: {failure.message}", code="delivery")
            self._refused(failure.token, f"{failure.token.origin.topic} does not take it: {failure.message}")
