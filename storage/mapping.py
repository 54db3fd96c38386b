"""Rows to tuples in the order of their table's columns, and back. Pure."""

from __future__ import annotations

import datetime as dt
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from contract.statuses import Status, Waste
from storage.rows import ZERO_USD, AttemptRow, ResultRow, day_of
from storage.statements import ATTEMPT_COLUMNS

_MS_PER_DAY = 86_400_000
_LAST_MS = 253_402_214_400_000 - 1
"""The end of the last day but one of year 9999: its partition ends on the last."""


def day_at(time_ms: int) -> dt.date:
    """``rows.day_of``, remembered for the days in use. A time that is none (before 1970, after 9999) counts as the
    nearest that is: a record's wrong clock must not keep its outcome out."""
    return _day(time_ms // _MS_PER_DAY)


def day_text(time_ms: int) -> str:
    """``day_at`` as the database reads it: the driver writes text several times faster than dates."""
    return _day_text(time_ms // _MS_PER_DAY)


@functools.lru_cache(maxsize=256)
def _day_text(number: int) -> str:
    return _day(number).isoformat()


@functools.lru_cache(maxsize=256)
def _day(number: int) -> dt.date:
    return day_of(min(max(number, 0), _LAST_MS // _MS_PER_DAY) * _MS_PER_DAY)


def words(values: Iterable[object]) -> str:
    """A Postgres array literal of values whose text needs no quotes: keys, numbers, days, statuses. A hundred times
    cheaper than a list of parameters."""
    return f"{{{','.join(map(str, values))}}}"


def texts(values: Iterable[str | None]) -> str:
    """A Postgres array literal of any texts. None is NULL."""
    return f"{{{','.join(map(_quoted, values))}}}"


def _quoted(text: str | None) -> str:
    if text is None:
        return "NULL"
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def result_values(row: ResultRow, key: str, generation: int) -> tuple[Any, ...]:
    """One row for ``COPY results``, in the order of ``RESULT_COLUMNS``."""
    output = row.output if row.keep_output else None
    return (
        day_text(row.appended_ms),
        key,
        generation,
        row.id,
        row.source,
        row.verified,
        row.pool,
        row.class_name,
        row.bucket,
        row.business_line,
        row.type,
        row.model,
        row.status.value,
        row.error_code,
        row.error_message,
        row.error_param,
        None if output is None else output.decode(),
        row.altered,
        row.keep_output,
        row.prompt_tokens,
        row.cached_tokens,
        row.output_tokens,
        row.usage_contradictory,
        row.latency_ms,
        row.queue_ms,
        row.inference_ms,
        row.charge_usd,
        row.degrade_level,
        row.attempt,
        row.worker,
        row.worker_epoch,
        row.tags_json(),
        row.batch_id,
        row.custom_id,
        row.topic,
        row.partition,
        row.offset,
        row.appended_ms,
        row.settled_ms,
    )


def result_from(values: Sequence[Any]) -> ResultRow:
    """A ``ResultRow`` from a row selected in the order of ``RESULT_COLUMNS``, json and key as text."""
    (
        _, key, generation, id_, source, verified, pool, class_name, bucket, business_line, type_, model, status,
        error_code, error_message, error_param, output, altered, keep_output, prompt_tokens, cached_tokens,
        output_tokens, usage_contradictory, latency_ms, queue_ms, inference_ms, charge_usd, degrade_level, attempt,
        worker, worker_epoch, tags, batch_id, custom_id, topic, partition, offset, appended_ms, settled_ms,
    ) = values  # fmt: skip
    return ResultRow(
        key=key,
        generation=generation,
        id=id_,
        source=source,
        verified=verified,
        pool=pool,
        class_name=class_name,
        bucket=bucket,
        business_line=business_line,
        type=type_,
        model=model,
        status=Status(status),
        error_code=error_code,
        error_message=error_message,
        error_param=error_param,
        output=None if output is None else output.encode(),
        altered=altered,
        keep_output=keep_output,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        output_tokens=output_tokens,
        usage_contradictory=usage_contradictory,
        latency_ms=latency_ms,
        queue_ms=queue_ms,
        inference_ms=inference_ms,
        charge_usd=charge_usd,
        degrade_level=degrade_level,
        attempt=attempt,
        worker=worker,
        worker_epoch=worker_epoch,
        tags=None if tags is None else orjson.loads(tags),
        batch_id=batch_id,
        custom_id=custom_id,
        topic=topic,
        partition=partition,
        offset=offset,
        appended_ms=appended_ms,
        settled_ms=settled_ms,
    )


def attempt_values(
    attempt: AttemptRow,
    row: ResultRow,
    key: str,
    generation: int,
    *,
    result_day: str | None = None,
    waste: Waste | None = None,
) -> tuple[Any, ...]:
    """One row for ``COPY attempts``, in the order of ``ATTEMPT_COLUMNS``: the attempt and what reports need of ``row``.

    ``waste`` is why nobody pays, unless the attempt says so itself. ``result_day`` is where its result
    stands, when that is not the row's own.
    """
    waste = attempt.waste or waste
    return (
        day_text(attempt.ended_ms),
        attempt.worker_epoch,
        attempt.seq,
        key,
        generation,
        result_day or day_text(row.appended_ms),
        row.pool,
        row.class_name,
        row.bucket,
        row.business_line,
        row.source,
        row.type,
        row.model,
        attempt.number,
        None if waste is None else waste.value,
        attempt.allocated_ns,
        attempt.charge_usd if waste is None else ZERO_USD,
        attempt.tariff_id,
        attempt.prompt_tokens,
        attempt.cached_tokens,
        attempt.output_tokens,
        attempt.started_ms,
        attempt.ended_ms,
    )


def keyless_attempt(attempt: AttemptRow, pool: str, waste: Waste) -> dict[str, Any]:
    """Engine time that belongs to no request: a line of waste without a key. Parameters of ``ADD_ATTEMPTS``."""
    given = {
        "day": day_at(attempt.ended_ms),
        "pool": pool,
        "waste": attempt.waste or waste,
        "charge_usd": ZERO_USD,
        "tariff_id": None,
    }
    return {name: given[name] if name in given else getattr(attempt, name, None) for name in ATTEMPT_COLUMNS}
