"""What people write first: a FastStream handler that asks a model server over HTTP and inserts a row.

64 handlers at once, as many as the server has slots; offsets are committed as records are handed over, which is
what FastStream offers together with handlers that run at once.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import httpx
import psycopg
from faststream import AckPolicy, FastStream
from faststream.confluent import KafkaBroker

HANDLERS = 64
CONNECTIONS = 8
INSERT = (
    "INSERT INTO answers (id, source, business_line, type, status, prompt_tokens, output_tokens, output)"
    " VALUES (%s, %s, %s, %s, %s, %s, %s, %s)"
)


async def main() -> None:
    given = json.loads(sys.argv[1])
    connections: asyncio.Queue[psycopg.AsyncConnection[Any]] = asyncio.Queue()
    for _ in range(CONNECTIONS):
        connections.put_nowait(await psycopg.AsyncConnection.connect(given["postgres"], autocommit=True))
    limits = httpx.Limits(max_connections=HANDLERS, max_keepalive_connections=HANDLERS)
    server = httpx.AsyncClient(base_url=given["server"], limits=limits, timeout=300)
    broker = KafkaBroker(given["bootstrap_servers"], apply_types=False, logger=None)

    async def handle(request: dict[str, Any]) -> None:
        body = {name: request[name] for name in ("messages", "max_tokens", "temperature", "ignore_eos")}
        answer = await server.post("/v1/chat/completions", json={"model": given["model"], **body})
        answer.raise_for_status()
        found = answer.json()
        usage = found["usage"]
        row = (
            request["id"], request["source"], request["business_line"], request["type"], "ok",
            usage["prompt_tokens"], usage["completion_tokens"], json.dumps({"choices": found["choices"]}),
        )  # fmt: skip
        connection = await connections.get()
        try:
            await connection.execute(INSERT, row)
        finally:
            connections.put_nowait(connection)

    broker.subscriber(
        given["topic"],
        group_id=given["group"],
        auto_offset_reset="earliest",
        max_workers=HANDLERS,
        ack_policy=AckPolicy.ACK_FIRST,
    )(handle)
    await FastStream(broker, logger=None).run()


if __name__ == "__main__":
    asyncio.run(main())
