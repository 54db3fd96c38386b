"""Publishes the load and counts what comes back. Threads end with ``stop``; their faults are raised in ``check``."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from contract import messages
from contract.messages import Request
from contract.settings import Settings
from headrace.demo.load import DEADLINE_S, OFFLINE, ONLINE, Load
from headrace.demo.tally import Tally
from producers import backends, lines
from producers.client import Client

_POLL_S = 0.2
_JOIN_S = 10.0
_READER = "results"


class Traffic:
    """One run's requests and results. ``source`` owns their ids."""

    def __init__(self, settings: Settings, source: str) -> None:
        self.tally = Tally()
        self._settings = settings
        self._load = Load(source)
        self._source = source
        self._client = Client(settings)
        self._publish_no_more = threading.Event()
        self._read_no_more = threading.Event()
        self._threads: list[threading.Thread] = []
        self._fault: BaseException | None = None

    def watch(self) -> None:
        """Begins to read results. Returns when the reader stands at the topic's end as it is now."""
        reader = backends.open(self._settings).read_topic(self._settings.names.results, "latest", None)
        self._spawn(_READER, lambda: self._read(reader))

    def publish_file(self, file: Path, requests: int) -> None:
        """Writes ``requests`` lines to ``file``, then publishes the file, in the background."""
        with file.open("wb") as stream:
            for _ in range(requests):
                stream.write(messages.encode(self._load.request(OFFLINE)) + b"\n")
        self.tally.counts[OFFLINE].planned = requests
        self._spawn("offline", lambda: self._publish_file(file))

    def publish_online(self, per_s: float, for_s: float = math.inf) -> None:
        """Publishes online requests with Poisson arrivals, in the background."""
        self._spawn("online", lambda: self._publish_online(per_s, for_s))

    @property
    def publishing(self) -> bool:
        """Whether anything is still being published."""
        return any(thread.is_alive() for thread in self._threads if thread.name != _READER)

    def check(self) -> None:
        """Raises what a thread failed with."""
        if self._fault is not None:
            raise self._fault

    def hold(self) -> None:
        """Publishes no more; results are still counted."""
        self._publish_no_more.set()
        for thread in self._threads:
            if thread.name != _READER:
                thread.join(_JOIN_S)

    def stop(self) -> None:
        """Ends all threads and connections; harmless twice."""
        self._read_no_more.set()
        self.hold()
        for thread in self._threads:
            thread.join(_JOIN_S)
        self._client.close(_JOIN_S)

    def _spawn(self, name: str, work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised again in check()
                self._fault = self._fault or error

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _publish_file(self, file: Path) -> None:
        def requests() -> Iterator[Request]:
            with file.open("rb") as stream:
                for number, line in lines.read_lines(stream):
                    if self._publish_no_more.is_set():
                        return
                    yield lines.parse_line(number, line)

        for ticket in self._client.submit_many(requests(), class_name=OFFLINE):
            self.tally.acknowledged(OFFLINE, ticket.key, ticket.id)

    def _publish_online(self, per_s: float, for_s: float) -> None:
        counts = self.tally.counts[ONLINE]
        counts.planned = round(per_s * for_s) if math.isfinite(for_s) else 0
        due_s = time.monotonic()
        end_s = due_s + for_s
        for gap_s in self._load.gaps_s(per_s):
            due_s += gap_s
            if due_s > end_s or self._publish_no_more.wait(max(0.0, due_s - time.monotonic())):
                break
            request = self._load.request(ONLINE)
            ticket = self._client.submit(request, class_name=ONLINE, deadline_s=DEADLINE_S, reply=False)
            self.tally.acknowledged(ONLINE, ticket.key, ticket.id)
        counts.planned = counts.published

    def _read(self, reader: backends.Reader) -> None:
        try:
            while not self._read_no_more.is_set():
                for record in reader.poll(_POLL_S):
                    result = messages.parse_result(record.value or b"")
                    if result.source == self._source:
                        self.tally.settled(result, time.monotonic())
        finally:
            reader.close()
