"""A broker and a database that faults may break, fresh topics and tables on them, and a steady load."""

from __future__ import annotations

import itertools
import random
import threading
import time
from pathlib import Path
from typing import Any

import confluent_kafka as ck
import orjson
from confluent_kafka import admin

from broker import config
from contract import identity
from gpu_workers import _guardian
from headrace.stack.kafka import KafkaServer
from headrace.stack.model import make_tiny_model
from headrace.stack.processes import wait_for
from tests.acceptance.harness import WorkerProcess, World
from tests.acceptance.servers import AT_ONCE, Servers

SESSION_S = 6.0
HEARTBEAT_S = 0.5
PARTITIONS = 4
_BROKER = {
    # With the newer group protocol the broker sets these for all; docs/operations.md names them.
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.session.timeout.ms": str(int(SESSION_S * 1000)),
    "group.consumer.min.heartbeat.interval.ms": "100",
    "group.consumer.heartbeat.interval.ms": str(int(HEARTBEAT_S * 1000)),
}
_numbers = itertools.count(1)


class Site(Servers):
    """The servers are whole between faults; each world has topics and a database of its own.

    ``outage_s``: how long a server that is stopped stays away; ``crew``: workers where many come and go.
    """

    def __init__(self, folder: Path, *, outage_s: float, crew: int) -> None:
        super().__init__(
            folder,
            {
                "kafka": {"session_timeout_ms": int(SESSION_S * 1000)},
                "topics": {"partitions": PARTITIONS},
                # What takes time says so in its prompt.
                "engine": {**AT_ONCE, "simulated_faults": True},
            },
        )
        self.kafka = KafkaServer(folder / "kafka", _BROKER)
        self.outage_s = outage_s
        self.crew = crew


def requests(rng: random.Random, count: int, *, slow_ms: int, prefix: str, **fields: Any) -> list[dict[str, Any]]:
    """``count`` requests that take 1 to ``slow_ms`` each in the engine."""
    base = {"source": "test", "max_tokens": 4, "business_line": "search"} | fields
    return [
        {"id": f"{prefix}-{number}", "prompt": f"FAULT:slow={rng.randint(1, slow_ms)} {number}", **base}
        for number in range(count)
    ]


_admins: dict[str, admin.AdminClient] = {}


def _admin(world: World) -> admin.AdminClient:
    """One client for each broker, kept: one that is closed with a request under way may end the process."""
    place = world.settings.kafka.bootstrap_servers
    if place not in _admins:
        _admins[place] = admin.AdminClient(config.admin_config(world.settings))
    return _admins[place]


def set_topic(world: World, topic: str, name: str, value: str) -> None:
    """Alters one property of a topic; returns when the broker has taken it."""
    entry = admin.ConfigEntry(name, value, incremental_operation=admin.AlterConfigOpType.SET)
    resource = admin.ConfigResource(admin.ResourceType.TOPIC, topic, incremental_configs=[entry])
    for future in _admin(world).incremental_alter_configs([resource]).values():
        future.result(timeout=15)


def refuse_writes(world: World, topic: str) -> None:
    """From now on the broker refuses (nearly) every record of ``topic``: none is made later than it arrives."""
    set_topic(world, topic, "message.timestamp.type", "CreateTime")
    set_topic(world, topic, "message.timestamp.before.max.ms", "0")


def take_writes(world: World, topic: str) -> None:
    """Ends ``refuse_writes``."""
    set_topic(world, topic, "message.timestamp.before.max.ms", "9223372036854775807")


def is_quiet(world: World, members: int) -> bool:
    """Whether each group of the class is stable, has its members and no partition without one."""
    groups = [world.topic(bucket=bucket) for bucket in world.settings.buckets.edges]
    for future in _admin(world).describe_consumer_groups(groups, request_timeout=10).values():
        group = future.result(timeout=15)
        held = sum(len(member.assignment.topic_partitions) for member in group.members if member.assignment)
        if (
            group.state != ck.ConsumerGroupState.STABLE
            or len(group.members) != members
            or held != world.settings.topics.partitions
        ):
            return False
    return True


class Load:
    """Publishes ``per_s`` requests a second on a thread of its own, until the block ends.

    ``ids`` are those the broker acknowledged, known when the block has ended; ``sent`` counts while it runs.
    A broker that is away is waited for.
    """

    def __init__(
        self, world: World, rng: random.Random, *, per_s: float = 100.0, slow_ms: int = 200, deadline_ms: int = 600_000
    ) -> None:
        self._topic = world.topic()
        self._producer = ck.Producer(config.producer_config(world.settings) | {"delivery.timeout.ms": 120_000})
        self._rng = rng
        self._pause_s = 10 / per_s
        self._fields = {"slow_ms": slow_ms, "deadline_ms": deadline_ms}
        self._prefix = f"load{next(_numbers)}"
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)
        self.ids: list[str] = []
        self.failed: list[str] = []
        self.sent = 0

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        assert self._producer.flush(120) == 0
        assert not self.failed, self.failed

    def _run(self) -> None:
        for number in itertools.count():
            for request in requests(self._rng, 10, prefix=f"{self._prefix}-{number}", **self._fields):
                self._producer.produce(
                    self._topic, orjson.dumps(request), str(request["id"]).encode(), on_delivery=self._noted(request)
                )
                self.sent += 1
            self._producer.poll(0)
            if self._stopping.wait(self._pause_s):
                return

    def _noted(self, request: dict[str, Any]) -> Any:
        def note(error: Any, _message: object) -> None:
            if error is None:
                self.ids.append(request["id"])
            else:
                self.failed.append(f"{request['id']}: {error}")

        return note


def metric(worker: WorkerProcess, name: str) -> float:
    """The value of one metric of a worker, with its labels as they are shown; 0: not there."""
    lines = worker.get("/metrics")[1].splitlines()
    return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name)), 0.0)


def carriers(marker: str) -> set[int]:
    """Living processes whose environment has an entry that begins with ``marker``."""
    return set(_guardian.carriers(marker.encode()))


def model_folder() -> str:
    """The tiny model, made once and kept over runs."""
    return str(make_tiny_model(Path(__file__).parents[2] / ".headrace" / "tiny-model"))


def wait_answered(world: World, load: Load, timeout_s: float = 120.0) -> None:
    """Returns when all that the broker has acknowledged by now is settled; what comes after is not waited for."""
    keys = {identity.request_key("test", id) for id in list(load.ids)}
    waiting = list(keys - {key for (key,) in world.query("SELECT key::text FROM settled")})
    count = "SELECT count(*) FROM settled WHERE key = ANY(%s::uuid[])"
    wait_for(lambda: world.value(count, waiting) == len(waiting), timeout_s, f"{len(waiting)} that waited are settled")


def hold_for(seconds: float) -> None:
    """The length of a fault: the one place where this suite waits for time and not for a condition."""
    time.sleep(seconds)
