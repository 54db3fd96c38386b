"""The bare loop: consume, parse, write the same rows, publish the same results, commit. Nothing else.

It has none of our machinery: a record that comes twice breaks it, a wrong one ends it, nobody is told its state, and
what headrace works out (charge, share of GPU time, durations, the answer itself) is constant. One thread: a batch's
results are acknowledged while the next batch's rows are written, so there is nothing else to wait for.
"""

from __future__ import annotations

import datetime as dt
import sys
import time
import uuid
from typing import Any

import confluent_kafka as ck
import orjson
import psycopg

BATCH = 2_000
NAMESPACE = uuid.UUID("6f1f6b1c-0d52-5e0a-9a0b-68656164726e")
TEXT = "3f21ab07 night gates close so ponds fill for morning each stone weighs more than it seems"
OUTPUT = {"choices": [{"index": 0, "text": TEXT, "finish_reason": "length", "logprobs": None}]}
OUTPUT_JSON = orjson.dumps(OUTPUT).decode()
SETTLED = "COPY settled (key, generation, outcome, day, records, winner_epoch, winner_seq) FROM STDIN"
RESULTS = (
    "COPY results (day, key, generation, id, source, verified, pool, class, bucket, business_line, type, model, status,"
    " output, altered, keep_output, prompt_tokens, cached_tokens, output_tokens, usage_contradictory, latency_ms,"
    " queue_ms, inference_ms, charge_usd, degrade_level, attempt, worker, worker_epoch, topic, partition,"
    " record_offset, appended_ms, settled_ms) FROM STDIN"
)
ATTEMPTS = (
    "COPY attempts (day, worker_epoch, seq, key, generation, result_day, pool, class, bucket, business_line, source,"
    " type, model, number, allocated_ns, charge_usd, tariff_id, prompt_tokens, cached_tokens, output_tokens,"
    " started_ms, ended_ms) FROM STDIN"
)
PLACE = ("default", "offline", "short")
MODEL = "tiny-llama"
CHARGE_USD = "0.00001905"
WORKER = "bare"


def main() -> None:
    given = orjson.loads(sys.argv[1])
    failed: list[Any] = []
    consumer = ck.Consumer(
        {
            "bootstrap.servers": given["bootstrap_servers"],
            "group.id": given["group"],
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "partition.assignment.strategy": "cooperative-sticky",
        }
    )
    producer = ck.Producer(
        {
            "bootstrap.servers": given["bootstrap_servers"],
            "acks": "all",
            "enable.idempotence": True,
            "on_delivery": lambda error, _: failed.append(error) if error else None,
        }
    )
    consumer.subscribe([given["topic"]])
    before: list[ck.TopicPartition] = []
    with psycopg.connect(given["postgres"]) as connection:
        while True:
            messages = consumer.consume(BATCH, 0.1)
            results = write(connection, messages) if messages else []
            if producer.flush(30) or failed:  # of the batch before
                raise SystemExit(f"results were not acknowledged: {failed[:3]}")
            if before:
                consumer.commit(offsets=before, asynchronous=True)
            before = ends(messages)
            for key, value in results:
                headers = [("hr-key", key), ("hr-status", b"ok")]
                producer.produce(given["results"], value, key, headers=headers)


def write(connection: psycopg.Connection[Any], messages: list[Any]) -> list[tuple[bytes, bytes]]:
    """One transaction for a batch; the results to publish."""
    now_ms = int(time.time() * 1_000)
    day = dt.datetime.fromtimestamp(now_ms / 1_000, dt.UTC).date()
    settled, rows, attempts, results = [], [], [], []
    for message in messages:
        if message.error():
            raise SystemExit(message.error().str())
        request = orjson.loads(message.value())
        request_id, source = request["id"], request["source"]
        line, kind = request["business_line"], request["type"]
        key = str(uuid.uuid5(NAMESPACE, f"id\x1f{len(source)}\x1f{source}\x1f{request_id}"))
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        appended_ms = message.timestamp()[1]
        latency_ms = now_ms - appended_ms
        prompt_tokens, output_tokens = len(request["prompt"]) // 4, request["max_tokens"]
        seq = partition << 40 | offset
        settled.append((key, 1, "ok", day, [f"{topic}/{partition}/{offset}"], 1, seq))
        rows.append(
            (day, key, 1, request_id, source, False, *PLACE, line, kind, MODEL, "ok", OUTPUT_JSON, False, True,
             prompt_tokens, 0, output_tokens, False, latency_ms, latency_ms, 0.1, CHARGE_USD, 0, 1, WORKER, 1,
             topic, partition, offset, appended_ms, now_ms)
        )  # fmt: skip
        attempts.append(
            (day, 1, seq, key, 1, day, *PLACE, line, source, kind, MODEL, 1, 100_000, CHARGE_USD, 1, prompt_tokens, 0,
             output_tokens, now_ms, now_ms)
        )  # fmt: skip
        result = {
            "v": 1, "key": key, "id": request_id, "source": source, "status": "ok", "model": MODEL,
            "usage": {"prompt_tokens": prompt_tokens, "cached_tokens": 0, "output_tokens": output_tokens},
            "latency_ms": latency_ms, "queue_ms": latency_ms, "inference_ms": 0.1, "cost_usd": CHARGE_USD,
            "worker": WORKER, "business_line": line, "type": kind, "output": OUTPUT,
        }  # fmt: skip
        results.append((key.encode(), orjson.dumps(result)))
    with connection.cursor() as cursor:
        for statement, batch in ((SETTLED, settled), (RESULTS, rows), (ATTEMPTS, attempts)):
            with cursor.copy(statement) as copy:
                for row in batch:
                    copy.write_row(row)
    connection.commit()
    return results


def ends(messages: list[Any]) -> list[ck.TopicPartition]:
    """Where the group goes on after these."""
    last = {(message.topic(), message.partition()): message.offset() for message in messages}
    return [ck.TopicPartition(*place, offset + 1) for place, offset in last.items()]


if __name__ == "__main__":
    main()
