"""The thread that owns one Kafka consumer, and alone touches it. One per class and length bucket.

It polls always: instead of sleeping it pauses partitions, so the group never loses it however long an
engine takes. Each turn: note what is durable, hold back or let go, commit, pull, close the window.

Model of a partition's life: *assigned* (a ``Lease`` with a fresh ``OffsetTracker``) → *revoked* (stop
feeding, wait for what is in the engine under one deadline, commit, forget) or *lost* (forget at once).
Offsets of a lease that is gone are never committed; its late outcomes still settle, and the unique
key in the database decides between them and the new owner's.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import confluent_kafka as ck

from broker import config
from consumers.item import Decoder, Headers, Item, Lease
from consumers.offsets import OffsetTracker
from consumers.window import Window
from contract import logs
from contract.errors import FatalError
from contract.metrics import Metrics
from contract.settings import Settings
from storage.rows import Claim

_SLICE_S = 0.02
"""Longest single poll: bounds how late a completion, a hold or a stop is noticed."""
_LOW_MARK = 0.5
"""Pulling starts again at this share of a high mark."""
_PAUSE_AFTER_S = 1.0
"""A high mark is waited out this long before partitions are paused: a pause throws away what the client
fetched ahead, and until the broker has sent it again nothing comes (measured: a pause in each turn of the
marks held the whole pipeline at 4,000 requests a second, half of what it does). It is also the longest that
a full intake keeps a rebalance waiting."""

_Key = tuple[str, int]


@dataclasses.dataclass(slots=True)
class Batch:
    """A closed window on its way to admission."""

    items: list[Item]
    claims: list[Claim]


class Intake:
    """Pulls windows of one length bucket of one priority class; commits what is done.

    One topic, one consumer, one group: assignors balance the partitions of a group over its members
    without regard to topics, and would give one worker all the busy ones
    (docs/decisions/one-consumer-per-topic.md).

    Args:
        sink: takes each closed window; called on the intake thread, must not block.
        hungry: whether the engine would idle without more of this bucket; any thread.
        released: told which leases stopped feeding, on the intake thread; must not block.
        forgotten: told which leases ended in order (not lost), likewise.
        failed: told the error that ended the thread.
    """

    def __init__(
        self,
        settings: Settings,
        class_name: str,
        bucket: str,
        *,
        sink: Callable[[Batch], None],
        hungry: Callable[[], bool],
        released: Callable[[Sequence[Lease]], None],
        forgotten: Callable[[Sequence[Lease]], None],
        failed: Callable[[BaseException], None],
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._class_name = class_name
        self._place = (class_name, bucket)
        self._topic = settings.names.request(settings.worker.pool, class_name, bucket)
        self._class = settings.classes[class_name]
        self._sink = sink
        self._hungry = hungry
        self._released = released
        self._forgotten = forgotten
        self._failed = failed
        self._metrics = metrics
        self._log = logs.get("consumers").bind(class_name=class_name, bucket=bucket)
        self._decoder = Decoder(settings)
        self._window: Window[Item] = Window(self._class.window)
        self._leases: dict[_Key, Lease] = {}
        self._trackers: dict[Lease, OffsetTracker] = {}
        self._starts: dict[Lease, int] = {}
        self._dropped: dict[Lease, int] = {}
        self._committed: dict[Lease, int] = {}
        self._completions: collections.deque[tuple[Lease, int]] = collections.deque()
        self._epoch = 0
        self._full = False
        self._holds: frozenset[str] = frozenset()
        self._holds_lock = threading.Lock()
        self._paused: set[_Key] = set()
        self._unknown: set[_Key] = set()
        self._next_commit_ns = 0
        self._stop_deadline: float | None = None
        self._closing = False
        self._joined = False
        self._consumer: Any = None
        self._thread = threading.Thread(target=self._run, name=f"intake-{class_name}-{bucket}", daemon=True)

    # -- any thread -------------------------------------------------------------------------------

    def start(self) -> None:
        """Joins the group and starts pulling."""
        self._thread.start()

    def hold(self, reason: str) -> None:
        """Stops pulling (not polling) until ``release`` with the same reason."""
        with self._holds_lock:
            self._holds |= {reason}

    def release(self, reason: str) -> None:
        """Takes one reason to hold away."""
        with self._holds_lock:
            self._holds -= {reason}

    @property
    def holds(self) -> frozenset[str]:
        """Why it does not pull; empty: it does."""
        return self._holds

    def stop(self, deadline: float) -> None:
        """Asks for the end: no more pulling; what is in hand may finish until ``deadline`` (monotonic s)."""
        self.hold("stopping")
        self._stop_deadline = deadline

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread's end; True when it ended."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def joined(self) -> bool:
        """Whether the group has given it a share, be it an empty one."""
        return self._joined

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._open()
            while not self._finished():
                self._run_once()
            self._close()
        except BaseException as error:  # noqa: BLE001 - a thread's end is never silent
            self._log.error("intake.failed", error=repr(error), exc_info=True)
            self._failed(error)

    def _open(self) -> None:
        properties = config.consumer_config(self._settings, self._topic, on_commit=self.on_commit)
        self._consumer = ck.Consumer(properties)
        self._consumer.subscribe(
            [self._topic], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
        )

    def _run_once(self) -> None:
        self._note_completions()
        self._wait_for_room()
        self._apply_pauses()
        self._commit_if_due()
        self._pull()
        self._close_window()

    def _finished(self) -> bool:
        if self._stop_deadline is None:
            return False
        return self._unsettled(self._trackers) == 0 or time.monotonic() >= self._stop_deadline

    def _close(self) -> None:
        self._closing = True
        for lease in self._leases.values():
            lease.feeding = False
        self._note_completions()
        self._commit(self._leases.values(), wait=True)
        self._consumer.close()  # revokes, and so forgets what is still in hand

    # -- what is durable --------------------------------------------------------------------------

    def _note_completions(self) -> None:
        completions = self._completions
        while completions:
            lease, offset = completions.popleft()
            if offset < 0:  # dropped, see Lease.drop
                if lease in self._dropped:
                    self._dropped[lease] += 1
                continue
            tracker = self._trackers.get(lease)
            if tracker is not None:
                tracker.done(offset)

    @property
    def _in_flight(self) -> int:
        return sum(tracker.in_flight for tracker in self._trackers.values())

    @property
    def _in_flight_bytes(self) -> int:
        return sum(tracker.in_flight_bytes for tracker in self._trackers.values())

    def _unsettled(self, leases: Any) -> int:
        return sum(self._trackers[lease].in_flight - self._dropped[lease] for lease in leases)

    def _commit_if_due(self) -> None:
        now_ns = time.monotonic_ns()
        if now_ns >= self._next_commit_ns:
            self._next_commit_ns = now_ns + self._settings.worker.commit_interval_ms * 1_000_000
            self._commit(self._leases.values(), wait=False)
            self._metrics.set("headrace_in_flight_requests", self._in_flight, *self._place)
            self._metrics.set("headrace_in_flight_bytes", self._in_flight_bytes, *self._place)
            self._metrics.set("headrace_paused_partitions", len(self._paused), *self._place)

    def _commit(self, leases: Any, *, wait: bool) -> None:
        offsets, positions = [], {}
        for lease in leases:
            position = self._trackers[lease].position
            if position is not None and position != self._committed.get(lease):
                offsets.append(ck.TopicPartition(lease.topic, lease.partition, position))
                positions[lease] = position
        if not offsets:
            return
        try:
            self._consumer.commit(offsets=offsets, asynchronous=not wait)
            self._committed.update(positions)
        except ck.KafkaException as error:
            # Refused in a rebalance, or the broker is away: the records are delivered again, and the
            # store answers them.
            self._log.warning("intake.commit_refused", error=str(error), wait=wait)

    def on_commit(self, error: Any, partitions: Any) -> None:
        """Librdkafka's report on a background commit; the next one repeats what this one missed."""
        if error is not None:
            self._committed.clear()
            self._log.warning("intake.commit_failed", error=str(error))

    # -- holding back -----------------------------------------------------------------------------

    def _wait_for_room(self) -> None:
        if not self._note_fullness() or self._paused:
            return
        self._close_window()
        deadline = time.monotonic() + _PAUSE_AFTER_S
        while self._note_fullness() and time.monotonic() < deadline:
            time.sleep(0.001)
            self._note_completions()

    def _note_fullness(self) -> bool:
        """Whether a mark holds the pull back: reached the high one, and not yet under the low one again."""
        fill = max(
            self._in_flight / self._class.max_in_flight_requests,
            self._in_flight_bytes / self._class.max_in_flight_bytes,
        )
        self._full = fill > _LOW_MARK if self._full else fill >= 1
        return self._full

    def _apply_pauses(self) -> None:
        if self._full or self._holds:
            wanted = set(self._leases)
        else:
            limit = self._settings.worker.offset_distance
            wanted = {key for key, lease in self._leases.items() if self._trackers[lease].distance >= limit}
        if wanted == self._paused and not self._unknown:
            return
        pause = [key for key in wanted if key not in self._paused or key in self._unknown]
        resume = [key for key in self._leases if key not in wanted and (key in self._paused or key in self._unknown)]
        if pause:
            self._consumer.pause([ck.TopicPartition(*key) for key in pause])
        if resume:
            self._consumer.resume([ck.TopicPartition(*key) for key in resume])
        self._paused = wanted
        self._unknown.clear()

    # -- pulling ----------------------------------------------------------------------------------

    def _pull(self) -> None:
        epoch = self._epoch
        now_ns = time.monotonic_ns()
        first = self._consumer.poll(min(_SLICE_S, self._window.wait_s(now_ns)))
        if first is None:
            return
        fetched = [first]
        room = min(self._window.room, self._class.max_in_flight_requests - self._in_flight) - 1
        if room > 0 and not first.error():
            # What has been fetched already; the window, not this call, decides how long to wait.
            fetched += self._consumer.consume(room, 0)
        now_ns = time.monotonic_ns()
        for message in fetched:
            if (error := message.error()) is not None:
                self._on_error(error)
            else:
                self._take(message, epoch, now_ns)

    def _take(self, message: Any, epoch: int, now_ns: int) -> None:
        key = (message.topic(), message.partition())
        lease = self._leases.get(key)
        if lease is None:
            return  # taken away during the call: its new owner reads it
        offset = message.offset()
        tracker = self._trackers[lease]
        expected = tracker.next_offset
        if lease.epoch > epoch and offset != expected:
            # Assigned anew during this very call: the record may stem from the assignment before, and
            # taking it would skip what lies between.
            self._consumer.seek(ck.TopicPartition(*key, self._starts[lease]))
            return
        if expected is not None and offset > expected:
            self._note_gap(lease, expected, offset)
        value = message.value()
        raw_key = message.key()
        headers: Headers = message.headers() or []
        size_bytes = (len(value) if value else 0) + (len(raw_key) if raw_key else 0)
        if not tracker.take(offset, size_bytes):
            return
        kind, appended_ms = message.timestamp()
        if kind == ck.TIMESTAMP_NOT_AVAILABLE or appended_ms < 0:
            appended_ms = int(time.time() * 1000)
        item = Item(lease, offset, appended_ms, raw_key, value, headers)
        item.tokens = self._decoder.estimate_tokens(lease.route, headers, size_bytes)
        self._window.add(item, item.tokens, now_ns)

    def _note_gap(self, lease: Lease, expected: int, offset: int) -> None:
        """Records between are gone: aborted or compacted ones are normal, those that retention took are a loss."""
        low, _ = self._consumer.get_watermark_offsets(ck.TopicPartition(lease.topic, lease.partition), cached=True)
        lost = min(low, offset) - expected
        if lost > 0:
            self._metrics.count("headrace_lost_records_total", self._class_name, by=lost)
            self._log.error("intake.records_lost_to_retention", topic=lease.topic, partition=lease.partition, lost=lost)

    def _close_window(self) -> None:
        if self._window.closing(time.monotonic_ns(), hungry=self._full or self._hungry()) is None:
            return
        items = [item for item in self._window.drain() if item.lease.feeding]
        if not items:
            return
        self._metrics.count("headrace_records_total", self._class_name, by=len(items))
        self._metrics.observe("headrace_window_requests", len(items), self._class_name)
        last: dict[Lease, int] = {}
        for item in items:
            last[item.lease] = item.offset
        claims = [
            Claim(lease.topic, lease.partition, self._trackers[lease].position or 0, offset)
            for lease, offset in last.items()
        ]
        self._sink(Batch(items, claims))

    def _on_error(self, error: Any) -> None:
        if error.fatal():
            raise FatalError(f"the Kafka client gave up: {error.str()}")
        if error.code() == ck.KafkaError.UNKNOWN_TOPIC_OR_PART:
            self._log.error("intake.topic_missing", topic=self._topic, fix="headrace topics create")
        elif error.code() != ck.KafkaError._PARTITION_EOF:
            self._log.warning("intake.kafka_error", code=error.name(), error=error.str())

    # -- rebalance: these run inside poll, on the intake thread, and never raise -------------------

    def _on_assign(self, consumer: Any, partitions: list[Any]) -> None:
        try:
            known = consumer.committed(partitions, timeout=self._settings.kafka.request_timeout_s)
        except ck.KafkaException as error:
            self._log.warning("intake.committed_unknown", error=str(error))
            known = partitions
        for found in known:
            key = (found.topic, found.partition)
            route = self._settings.names.parse(found.topic)
            if route is None:
                continue
            self._epoch += 1
            lease = Lease(found.topic, found.partition, self._epoch, route, self._completions)
            start = found.offset if found.offset >= 0 and found.error is None else None
            self._leases[key] = lease
            self._trackers[lease] = OffsetTracker(start)
            self._starts[lease] = ck.OFFSET_BEGINNING if start is None else start
            self._dropped[lease] = 0
            if start is not None:
                self._committed[lease] = start
            self._unknown.add(key)
        self._joined = True
        self._log.info("intake.assigned", partitions=len(partitions), in_hand=len(self._leases))

    def _on_revoke(self, consumer: Any, partitions: list[Any]) -> None:
        try:
            leases = self._stop_feeding(partitions)
            deadline = time.monotonic() + self._settings.worker.revoke_timeout_s
            while not self._closing and self._unsettled(leases) > 0 and time.monotonic() < deadline:
                time.sleep(0.002)
                self._note_completions()
            self._commit(leases, wait=True)
            self._log.info("intake.revoked", partitions=len(leases), unsettled=self._unsettled(leases))
            self._forget(leases)
            self._forgotten(leases)
        except Exception as error:  # noqa: BLE001 - raising here would lose records already taken
            self._log.error("intake.revoke_failed", error=repr(error), exc_info=True)

    def _on_lost(self, consumer: Any, partitions: list[Any]) -> None:
        try:
            leases = self._stop_feeding(partitions)
            self._log.warning("intake.lost", partitions=len(leases), unsettled=self._unsettled(leases))
            self._forget(leases)
        except Exception as error:  # noqa: BLE001 - raising here would lose records already taken
            self._log.error("intake.lost_failed", error=repr(error), exc_info=True)

    def _stop_feeding(self, partitions: list[Any]) -> list[Lease]:
        leases = [
            lease for found in partitions if (lease := self._leases.get((found.topic, found.partition))) is not None
        ]
        for lease in leases:
            lease.feeding = False
        now_ns = time.monotonic_ns()
        for item in self._window.drain():
            if item.lease.feeding:
                self._window.add(item, item.tokens, now_ns)
            else:
                item.lease.drop()
        self._released(leases)
        return leases

    def _forget(self, leases: list[Lease]) -> None:
        for lease in leases:
            del self._leases[lease.topic, lease.partition], self._trackers[lease]
            del self._starts[lease], self._dropped[lease]
            self._committed.pop(lease, None)
            self._paused.discard((lease.topic, lease.partition))
