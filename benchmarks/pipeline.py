"""The whole path with an engine that answers at once: what headrace itself costs, against peers in the same run.

Each contender has topics, records and tables of its own on the same servers, and one process. The first transaction's
commit starts the clock and the last one's stops it, as Postgres itself wrote them down; the rows of the first do not
count. So no start-up is in it, and nothing looks at anybody's clock but the database's.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import confluent_kafka as ck
import psutil
import psycopg

from benchmarks import load
from benchmarks.figure import Goal
from benchmarks.site import ROOT, Site, peers_python
from broker import config
from headrace.stack.processes import Child, wait_for
from storage.store import Store
from tests.acceptance.harness import World

REQUESTS = 200_000
THROUGHPUT: Mapping[str, Mapping[str, Any]] = {
    "worker": {"classes": ["offline"]},
    "engine": {"max_requests": 1_024},
}
"""What a deployment for throughput sets; the rest is default."""
_DONE_S = 300.0
_TRAILING_S = 5.0
"""How long after its last row a contender may still publish and commit offsets."""
_LOOK_EVERY_S = 1.0

VS_BARE = (
    Goal(
        "pipeline.vs_bare", "requests a second: headrace ÷ a bare loop that writes and publishes the same", "×", "≥ 0.6"
    ),
    Goal("pipeline.worker_cpu_us", "CPU time of the worker per request", "µs", "report; aim ≤ 60"),
    Goal("pipeline.bare_cpu_us", "CPU time of the bare loop per request", "µs"),
    Goal("pipeline.headrace_per_s", "requests a second through headrace (beside the bare loop)", "/s"),
    Goal("pipeline.bare_per_s", "requests a second through the bare loop", "/s"),
)
VS_FASTSTREAM = (
    Goal("pipeline.vs_faststream", "headrace ÷ FastStream that inserts one plain row each", "×", "> 1.0; aim 1.5"),
    Goal("pipeline.vs_faststream_copy", "the same with COPY into a table without a key: redelivery doubles rows", "×"),
    Goal("pipeline.faststream_per_s", "requests a second through FastStream", "/s"),
    Goal("pipeline.faststream_cpu_us", "CPU time of FastStream's process per request", "µs"),
)
VS_QUIX = (
    Goal("pipeline.vs_quix", "headrace ÷ Quix Streams that inserts one plain row each", "×", "> 1.0; aim 1.5"),
    Goal("pipeline.vs_quix_copy", "the same with COPY into a table without a key: redelivery doubles rows", "×"),
    Goal("pipeline.quix_per_s", "requests a second through Quix Streams", "/s"),
    Goal("pipeline.quix_cpu_us", "CPU time of Quix Streams' process per request", "µs"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Pace:
    """How fast one contender went."""

    per_s: float
    cpu_us: float
    """Of its process, per request."""


def vs_bare(site: Site) -> dict[str, float]:
    """200,000 requests through headrace and through a bare loop that does the same work with nothing around it."""
    ours, theirs = _race(site, headrace, bare)
    return {
        "pipeline.vs_bare": ours.per_s / theirs.per_s,
        "pipeline.worker_cpu_us": ours.cpu_us,
        "pipeline.bare_cpu_us": theirs.cpu_us,
        "pipeline.headrace_per_s": ours.per_s,
        "pipeline.bare_per_s": theirs.per_s,
    }


def vs_faststream(site: Site) -> dict[str, float]:
    """The same through headrace, with all its bookkeeping, and through FastStream, which writes one plain row each."""
    ours, inserting, copying = _race(site, headrace, faststream, functools.partial(faststream, copy=True))
    return {
        "pipeline.vs_faststream": ours.per_s / inserting.per_s,
        "pipeline.vs_faststream_copy": ours.per_s / copying.per_s,
        "pipeline.faststream_per_s": inserting.per_s,
        "pipeline.faststream_cpu_us": inserting.cpu_us,
    }


def vs_quix(site: Site) -> dict[str, float]:
    """The same through headrace and through Quix Streams' batching sink, which writes one plain row each."""
    ours, inserting, copying = _race(site, headrace, quix, functools.partial(quix, copy=True))
    return {
        "pipeline.vs_quix": ours.per_s / inserting.per_s,
        "pipeline.vs_quix_copy": ours.per_s / copying.per_s,
        "pipeline.quix_per_s": inserting.per_s,
        "pipeline.quix_cpu_us": inserting.cpu_us,
    }


def _race(site: Site, *contenders: Callable[[Site], Pace]) -> list[Pace]:
    """Each one's pace, one after the other; every other run goes backwards."""
    step = -1 if site.run % 2 else 1
    return [contender(site) for contender in contenders[::step]][::step]


# -- contenders -----------------------------------------------------------------------------------


def headrace(site: Site) -> Pace:
    """One worker with all that it does: claims, look-ups, metering, three tables, results, offsets."""
    with site.world(**THROUGHPUT) as world:
        count = site.scaled(REQUESTS)
        topic = load.publish(world, count)
        site.calm()
        worker = world.worker()
        pace = _pace(worker.child, world.settings.postgres.url, "results", count)
        _check(world, topic, count, results=count)
        if worker.terminate() or world.reconcile():
            raise RuntimeError(f"the worker's books do not add up\n{worker.child.tail()}")
        return pace


def bare(site: Site) -> Pace:
    """``peers/bare.py``: the same tables and the same results topic."""
    with site.world() as world:
        store = Store(world.settings.postgres)
        store.make_partitions()
        store.close()
        return _peer(site, world, "bare", Path(sys.executable), "results", publishes=True)


def faststream(site: Site, *, copy: bool = False) -> Pace:
    """``peers/faststream_rows.py``."""
    return _one_row_each(site, "faststream_rows", copy)


def quix(site: Site, *, copy: bool = False) -> Pace:
    """``peers/quix_rows.py``."""
    return _one_row_each(site, "quix_rows", copy)


def _one_row_each(site: Site, program: str, copy: bool) -> Pace:
    python = peers_python()
    key = "" if copy else "PRIMARY KEY"
    with site.world() as world:
        with psycopg.connect(world.settings.postgres.url) as connection:
            connection.execute(
                f"CREATE TABLE answers (id text {key}, source text, business_line text, type text, status text,"
                " prompt_tokens int, output_tokens int, output json, created_at timestamptz DEFAULT now())".encode()
            )
        return _peer(site, world, program, python, "answers", publishes=False, copy=copy)


def _peer(
    site: Site, world: World, program: str, python: Path, table: str, *, publishes: bool, copy: bool = True
) -> Pace:
    count = site.scaled(REQUESTS)
    topic = load.publish(world, count)
    given = {
        "bootstrap_servers": world.settings.kafka.bootstrap_servers,
        "topic": topic,
        "group": topic,
        "postgres": world.settings.postgres.url,
        "results": world.settings.names.results,
        "copy": copy,
    }
    argv = (python, "-m", f"benchmarks.peers.{program}", json.dumps(given))
    child = Child(program, argv, world.folder / f"{program}.log", cwd=ROOT)
    site.calm()
    child.start()
    try:
        pace = _pace(child, world.settings.postgres.url, table, count)
        _check(world, topic, count, results=count if publishes else 0)
        return pace
    finally:
        child.stop()


# -- measuring ------------------------------------------------------------------------------------


def _pace(child: Child, url: str, table: str, count: int) -> Pace:
    """Waits until ``table`` has ``count`` rows; from the second transaction's rows on, by commit times."""
    process = psutil.Process(child.pid)
    samples: list[tuple[float, float]] = []
    """Wall clock and CPU time of the process, both s."""
    next_look_s = 0.0
    with psycopg.connect(url, autocommit=True) as connection:

        def done() -> bool:
            nonlocal next_look_s
            cpu = process.cpu_times()
            samples.append((time.time(), cpu.user + cpu.system))
            if time.monotonic() < next_look_s:
                return False
            next_look_s = time.monotonic() + _LOOK_EVERY_S
            return _rows(connection, table) >= count

        child.wait_until(done, _DONE_S, f"{count} rows")
        commits = connection.execute(
            f"SELECT extract(epoch FROM pg_xact_commit_timestamp(xmin))::float8, count(*) FROM {table} GROUP BY 1"
            " ORDER BY 1".encode()
        ).fetchall()
    rows = sum(rows for _, rows in commits)
    if rows != count:
        raise RuntimeError(f"{child.name} wrote {rows} rows for {count} requests")
    (first_s, in_first), (last_s, _) = commits[0], commits[-1]
    if in_first == rows:
        raise RuntimeError("all in one transaction: too few requests to measure a pace")
    cpu_s = _at(samples, last_s) - _at(samples, first_s)
    return Pace((rows - in_first) / (last_s - first_s), cpu_s / (rows - in_first) * 1e6)


def _rows(connection: psycopg.Connection[Any], table: str) -> int:
    found = connection.execute(f"SELECT count(*) FROM {table}".encode()).fetchone()
    return int(found[0]) if found else 0


def _at(samples: list[tuple[float, float]], time_s: float) -> float:
    """The sampled value at a time, on the straight line between its neighbours."""
    place = min(max(bisect.bisect(samples, (time_s,)), 1), len(samples) - 1)
    (before_s, before), (after_s, after) = samples[place - 1], samples[place]
    return before + (after - before) * (time_s - before_s) / (after_s - before_s)


def _check(world: World, topic: str, count: int, *, results: int) -> None:
    """Every offset is committed, and every result published. Raises ``TimeoutError``."""
    wait_for(lambda: sum(world.committed(topic).values()) == count, _TRAILING_S, f"{count} offsets committed")
    if results:
        published = world.settings.names.results
        wait_for(lambda: _size(world, published) == results, _TRAILING_S, f"{results} results published")


def _size(world: World, topic: str) -> int:
    """Records in a topic."""
    reader = ck.Consumer(config.consumer_config(world.settings, "size"))
    try:
        ends = [
            reader.get_watermark_offsets(ck.TopicPartition(topic, part), timeout=10)
            for part in reader.list_topics(topic, timeout=10).topics[topic].partitions
        ]
        return sum(high - low for low, high in ends)
    finally:
        reader.close()
