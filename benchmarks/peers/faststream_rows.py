"""FastStream over confluent-kafka: batches of a topic, one plain row each, offsets acknowledged after them."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import psycopg
from faststream import AckPolicy, FastStream
from faststream.confluent import KafkaBroker

from benchmarks.peers.answers import COPY, INSERT, row

BATCH = 2_000


async def main() -> None:
    given = json.loads(sys.argv[1])
    connection = await psycopg.AsyncConnection.connect(given["postgres"])
    # Without apply_types each request would be validated by pydantic once more.
    broker = KafkaBroker(given["bootstrap_servers"], apply_types=False, logger=None)

    async def handle(requests: list[dict[str, Any]]) -> None:
        rows = [row(request) for request in requests]
        async with connection.cursor() as cursor:
            if given["copy"]:
                async with cursor.copy(COPY) as copy:
                    for one in rows:
                        await copy.write_row(one)
            else:
                await cursor.executemany(INSERT, rows)
        await connection.commit()

    broker.subscriber(
        given["topic"],
        group_id=given["group"],
        auto_offset_reset="earliest",
        batch=True,
        max_records=BATCH,
        ack_policy=AckPolicy.ACK,
    )(handle)
    await FastStream(broker, logger=None).run()


if __name__ == "__main__":
    asyncio.run(main())
