"""A real Apache Kafka broker (KRaft, one node) from its jars.

The jars come from ``make setup`` (``deploy/kafka/pom.xml``) and lie in ``.headrace/kafka-libs``;
``HEADRACE_KAFKA_LIBS`` names another place.
"""

from __future__ import annotations

import base64
import os
import random
import secrets
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from headrace.stack.processes import Child, StackError

LIBS_VARIABLE = "HEADRACE_KAFKA_LIBS"
HOST = "127.0.0.1"
_PORT_TRIES = 3

_PROPERTIES = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    # One node: every internal topic has one copy.
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "8",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    # After a kill -9 the controller waits this long before it takes the same node back (default 9 s).
    "broker.session.timeout.ms": "4000",
    "broker.heartbeat.interval.ms": "1000",
    # A topic nobody made is a mistake that must show, not a topic with other settings.
    "auto.create.topics.enable": "false",
    "message.max.bytes": "1048576",
    # The default takes 128 MB of the heap for compaction of topics with many keys; ours have few.
    "log.cleaner.dedupe.buffer.size": "16777216",
}


def libs_folder() -> Path:
    """Where the broker's jars lie. Raises ``StackError`` that says how to get them."""
    folder = Path(os.environ.get(LIBS_VARIABLE) or Path(__file__).parents[2] / ".headrace" / "kafka-libs")
    if not any(folder.glob("kafka_2.13-*.jar")):
        raise StackError(
            f"no Kafka jars in {folder}: run `make setup`, or name their folder in {LIBS_VARIABLE}, "
            "or a running broker in HEADRACE_KAFKA__BOOTSTRAP_SERVERS"
        )
    return folder.resolve()


class KafkaServer:
    """A broker with its data in ``folder``. Ports are chosen at the first start and kept over restarts.

    ``properties`` are server properties that replace or add to the defaults.
    """

    def __init__(self, folder: Path, properties: Mapping[str, str] | None = None, *, heap_mb: int = 512) -> None:
        self.folder = folder.absolute()
        self._properties = dict(properties or {})
        self._heap_mb = heap_mb
        self._ports: tuple[int, int] | None = None
        self._child: Child | None = None

    @property
    def bootstrap_servers(self) -> str:
        """``host:port``. Raises ``StackError`` before the first start."""
        if self._ports is None:
            raise StackError("the broker was not started")
        return f"{HOST}:{self._ports[0]}"

    @property
    def log(self) -> Path:
        return self.folder / "broker.log"

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.running

    def start(self, timeout_s: float = 60.0) -> None:
        """Starts the broker; returns when it answers an admin call (about 4 s, 3 s when it has data).

        Raises ``StackError`` with the last log lines when it ends early or is not ready in time.
        """
        if self.running:
            return
        for left in reversed(range(_PORT_TRIES)):
            chosen = self._ports or _free_ports()
            child = self._launch(chosen)
            try:
                child.wait_until(lambda port=chosen[0]: _answers(port), timeout_s, "the broker answers")  # type: ignore[misc]
            except BaseException as error:
                child.stop(0)
                # Somebody took the port between our look and the broker's start: others, unless they are promised.
                taken = isinstance(error, StackError) and "Address already in use" in child.tail(200)
                if self._ports is None and taken and left:
                    continue
                raise
            self._ports, self._child = chosen, child
            return

    def stop(self, timeout_s: float = 30.0) -> None:
        """Controlled shutdown; by force at the deadline. Data stays."""
        if self._child is not None:
            self._child.stop(timeout_s)

    def kill(self) -> None:
        """kill -9."""
        if self._child is not None:
            self._child.kill()

    def _launch(self, ports: tuple[int, int]) -> Child:
        libs = libs_folder()
        if shutil.which("java") is None:
            raise StackError("no `java`: install a JRE of version 17 or later (Debian: default-jre-headless)")
        data = self.folder / "data"
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "server.properties"
        config.write_text(_config_text(data, ports, self._properties))
        log4j = Path(__file__).with_name("log4j2.properties")
        java = [
            "java",
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1",
            f"-Dlog4j2.configurationFile={log4j.as_uri()}",
            "-cp",
            f"{libs}/*",
        ]
        if not (data / "meta.properties").exists():
            _format(java, config)
        child = Child("kafka", [*java[:1], f"-Xmx{self._heap_mb}m", *java[1:], "kafka.Kafka", str(config)], self.log)
        child.start()
        return child


def _config_text(data: Path, ports: tuple[int, int], properties: Mapping[str, str]) -> str:
    broker_port, controller_port = ports
    merged = {
        **_PROPERTIES,
        "log.dirs": str(data),
        "listeners": f"PLAINTEXT://{HOST}:{broker_port},CONTROLLER://{HOST}:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://{HOST}:{broker_port}",
        "controller.quorum.voters": f"1@{HOST}:{controller_port}",
        **properties,
    }
    return "".join(f"{name}={value}\n" for name, value in merged.items())


def _format(java: list[str], config: Path) -> None:
    # A first byte of our own: an id that begins with "-" would be read as an option.
    cluster_id = base64.urlsafe_b64encode(b"h" + secrets.token_bytes(15)).rstrip(b"=").decode()
    done = subprocess.run(
        [*java, "kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(config)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode:
        raise StackError(f"formatting the broker's folder failed:\n{done.stdout}{done.stderr}")


def _free_ports() -> tuple[int, int]:
    """Two ports nobody listens on, from below the range that outgoing connections take."""
    found: list[int] = []
    while len(found) < 2:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found[0], found[1]


def _answers(port: int) -> bool:
    try:
        with socket.create_connection((HOST, port), timeout=1):
            pass
    except OSError:
        return False
    admin = AdminClient({"bootstrap.servers": f"{HOST}:{port}", "log_level": 0})
    try:
        return bool(admin.list_topics(timeout=5).brokers)
    except KafkaException:
        return False
