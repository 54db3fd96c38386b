"""Real workers as processes, raw records in, and the questions every acceptance test asks of the database."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import confluent_kafka as ck
import msgspec
import orjson
import psycopg
from confluent_kafka.admin import AdminClient

from broker import config, topics
from contract import settings as contract_settings
from contract.messages import Result, parse_result
from contract.settings import Settings
from headrace.stack.processes import Child, wait_for
from storage.reconcile import reconcile
from storage.store import Store

_numbers = itertools.count(1)


def with_worker(settings: Settings, **worker: Any) -> Settings:
    """``settings`` with some fields of ``[worker]`` changed."""
    return msgspec.structs.replace(settings, worker=msgspec.structs.replace(settings.worker, **worker))


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class WorkerProcess:
    """``headrace worker`` as a user runs it."""

    def __init__(self, settings: Settings, folder: Path, *, env: Mapping[str, str] = {}, **worker: Any) -> None:
        self.port = free_port()
        self.name = f"w{next(_numbers)}"
        self.settings = with_worker(settings, http_port=self.port, name=self.name, **worker)
        environment = contract_settings.environment(self.settings) | dict(env)
        self.child = Child(
            self.name, [sys.executable, "-m", "headrace", "worker"], folder / f"{self.name}.log", env=environment
        )

    def start(self) -> WorkerProcess:
        self.child.start()
        return self

    def ready(self, timeout_s: float = 60.0) -> WorkerProcess:
        self.child.wait_until(lambda: self.get("/readyz")[0] == 200, timeout_s, "ready")
        return self

    def get(self, path: str) -> tuple[int, str]:
        """HTTP status (0: no answer) and body."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def terminate(self, timeout_s: float = 40.0) -> int:
        self.child.send(signal.SIGTERM)
        return self.child.wait(timeout_s)

    def log_events(self) -> list[dict[str, Any]]:
        """The structured lines of its log."""
        lines = self.child.log.read_text("utf-8", "replace").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def rss_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.child.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


class World:
    """A broker, a database and topics of one test's own, with publishers and readers that assume nothing."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self.folder = folder
        topics.ensure(settings)
        self._producer = ck.Producer(config.producer_config(settings))
        self.workers: list[WorkerProcess] = []

    def worker(self, *, env: Mapping[str, str] = {}, **worker: Any) -> WorkerProcess:
        """A started worker; it ends with the test. ``env`` is added to its environment."""
        one = WorkerProcess(self.settings, self.folder, env=env, **worker)
        self.workers.append(one)
        return one.start()

    def close(self) -> None:
        for one in self.workers:
            one.child.send(signal.SIGCONT)
            one.child.stop(timeout_s=15.0)

    def topic(self, class_name: str = "online", bucket: str = "short") -> str:
        return self.settings.names.request("default", class_name, bucket)

    def publish(
        self,
        values: Iterable[Mapping[str, Any] | bytes | None],
        *,
        topic: str | None = None,
        partition: int = -1,
        key: bytes | None = None,
        headers: Sequence[tuple[str, bytes | None]] = (),
    ) -> None:
        """Raw records, acknowledged when this returns."""
        failed: list[Any] = []
        for value in values:
            data = orjson.dumps(value) if isinstance(value, Mapping) else value
            own_key = str(value["id"]).encode() if isinstance(value, Mapping) and "id" in value else None
            while True:
                try:
                    self._producer.produce(
                        topic or self.topic(), data, key or own_key, partition, headers=list(headers),
                        on_delivery=lambda error, _: failed.append(error) if error else None,
                    )  # fmt: skip
                    break
                except BufferError:
                    self._producer.poll(0.1)
        assert self._producer.flush(30) == 0
        assert not failed, failed

    def requests(self, count: int, *, prefix: str = "r", **fields: Any) -> list[dict[str, Any]]:
        """``count`` small requests with ids ``r-0…``."""
        base = {"source": "test", "max_tokens": 4, "business_line": "search"} | fields
        return [{"id": f"{prefix}-{number}", "prompt": f"number {number}", **base} for number in range(count)]

    def query(self, statement: str, *args: Any) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.settings.postgres.url) as connection:
            return connection.execute(statement.encode(), args or None).fetchall()

    def value(self, statement: str, *args: Any) -> Any:
        return self.query(statement, *args)[0][0]

    def settled(self) -> int:
        return int(self.value("SELECT count(*) FROM settled"))

    def wait_settled(self, count: int, timeout_s: float = 60.0) -> None:
        wait_for(lambda: self.settled() >= count, timeout_s, f"{count} settled; last seen {self.settled()}")

    def read(self, topic: str) -> list[ck.Message]:
        """Every record that is in a topic now."""
        reader = ck.Consumer(config.consumer_config(self.settings, f"read-{next(_numbers)}"))
        try:
            parts = reader.list_topics(topic, timeout=10).topics[topic].partitions
            ends = {part: reader.get_watermark_offsets(ck.TopicPartition(topic, part), timeout=10) for part in parts}
            wanted = sum(high - low for low, high in ends.values())
            reader.assign([ck.TopicPartition(topic, part, low) for part, (low, _) in ends.items()])
            found: list[ck.Message] = []

            def complete() -> bool:
                found.extend(message for message in reader.consume(1_000, 0.2) if message.error() is None)
                return bool(len(found) >= wanted)

            wait_for(complete, 30, f"{wanted} records of {topic}")
            return found
        finally:
            reader.close()

    def results(self) -> list[Result]:
        return [parse_result(message.value()) for message in self.read(self.settings.names.results)]

    def wait_results(self, count: int, timeout_s: float = 60.0) -> list[Result]:
        """All results once there are at least ``count`` (duplicates counted)."""
        return wait_for(
            lambda: found if len(found := self.results()) >= count else None, timeout_s, f"{count} results published"
        )

    def reconcile(self) -> list[Any]:
        """What does not add up, once every worker has ended."""
        store = Store(self.settings.postgres)
        try:
            store.reap(0.0)
            return list(reconcile(store))
        finally:
            store.close()

    def committed(self, topic: str) -> dict[int, int]:
        """Committed offset per partition; the group has the topic's name."""
        reader = ck.Consumer(config.consumer_config(self.settings, topic))
        try:
            parts = reader.list_topics(topic, timeout=10).topics[topic].partitions
            found = reader.committed([ck.TopicPartition(topic, part) for part in parts], timeout=10)
            return {one.partition: one.offset for one in found}
        finally:
            reader.close()

    def delete_records(self, topic: str, partition: int, *, before: int) -> None:
        """Does what retention does."""
        admin = AdminClient(config.admin_config(self.settings))
        for future in admin.delete_records([ck.TopicPartition(topic, partition, before)]).values():
            future.result(timeout=10)

    def lag(self, class_name: str = "online") -> int:
        """Records of a class that are not committed."""
        total = 0
        for bucket in self.settings.buckets.edges:
            topic = self.topic(class_name, bucket)
            reader = ck.Consumer(config.consumer_config(self.settings, "lag"))
            try:
                for part, offset in self.committed(topic).items():
                    low, high = reader.get_watermark_offsets(ck.TopicPartition(topic, part), timeout=10)
                    total += high - max(offset, low)
            finally:
                reader.close()
        return total

    def assert_sound(self, requests: int) -> None:
        """Nothing lost, nothing doubled, nothing charged twice."""
        assert self.settled() == requests
        assert self.value("SELECT count(*) FROM results") == requests
        doubled = self.query(
            "SELECT key, count(*) FROM attempts WHERE waste IS NULL GROUP BY key, generation HAVING count(*) > 1"
        )
        assert doubled == []
        assert self.query("SELECT key FROM attempts WHERE waste IS NOT NULL AND charge_usd <> 0") == []
        by_key: dict[tuple[str, int], set[Any]] = {}
        for result in self.results():
            by_key.setdefault((result.key, result.generation), set()).add(orjson.dumps(result.output))
        assert len({key for key, _ in by_key}) == requests
        assert all(len(outputs) == 1 for outputs in by_key.values())
