"""Quix Streams: a batching sink, one plain row each, a checkpoint (and so a commit) every 8,000 requests."""

from __future__ import annotations

import json
import sys
from typing import Any

import psycopg
from quixstreams import Application
from quixstreams.sinks import BatchingSink, SinkBatch

from benchmarks.peers.answers import COPY, INSERT, row

CHECKPOINT = 8_000
"""A checkpoint writes one batch per partition: about 2,000 each."""


class Answers(BatchingSink):  # type: ignore[misc]
    def __init__(self, url: str, copy: bool) -> None:
        super().__init__()
        self._url = url
        self._copy = copy

    def setup(self) -> None:
        self._connection: psycopg.Connection[Any] = psycopg.connect(self._url)

    def write(self, batch: SinkBatch) -> None:
        rows = [row(item.value) for item in batch]
        with self._connection.cursor() as cursor:
            if self._copy:
                with cursor.copy(COPY) as copy:
                    for one in rows:
                        copy.write_row(one)
            else:
                cursor.executemany(INSERT, rows)
        self._connection.commit()


def main() -> None:
    given = json.loads(sys.argv[1])
    app = Application(
        broker_address=given["bootstrap_servers"],
        consumer_group=given["group"],
        auto_offset_reset="earliest",
        commit_every=CHECKPOINT,
        commit_interval=1.0,
        loglevel="WARNING",
    )
    topic = app.topic(given["topic"], value_deserializer="json")
    app.dataframe(topic).sink(Answers(given["postgres"], given["copy"]))
    app.run()


if __name__ == "__main__":
    main()
