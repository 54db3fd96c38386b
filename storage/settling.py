"""Settlement: one transaction decides who answers each key and writes everything that follows from it.

The model. ``settled`` has one row per key. Who inserts it wins; who finds an answer there, or its own
record, loses; who finds a refusal and brings a new record wins the next generation. The winners' results
and attempts go in by COPY in the same transaction, so that answer, charge and ledger are one fact.

A key twice in a batch is settled one after the other, answers first: the first answer wins.

When a commit's reply is lost, the batch is simply settled again: it loses to its own rows, which are known
by (worker epoch, attempt, record), and that counts as won. Nothing is kept in memory for it, so it holds
over restarts of the call, the connection and the process' retry loop alike.

A row that the database cannot hold must not hold up its neighbours: the batch is halved until it stands
alone, and is then settled as ``failed`` with code ``unstorable``.
"""

from __future__ import annotations

import datetime as dt
import decimal
import time
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import psycopg
import sqlalchemy as sa
from sqlalchemy import exc

from contract.errors import Fenced
from contract.messages import clean_text
from contract.statuses import ANSWERS, Status, Waste
from storage import partitions, statements
from storage.database import Database, driver, is_data_error, message_of, original
from storage.mapping import attempt_values, day_at, result_from, result_values, texts, words
from storage.rows import ZERO_USD, ResultRow, Settlement, Verdict

UNSTORABLE = "unstorable"
_MESSAGE_CHARS = 500
_EXACT = decimal.Context(prec=60)


class _Entry(msgspec.Struct):
    """One settlement of a batch, with what the transaction needs to know of it."""

    settlement: Settlement
    place: int
    key: str
    record: str
    day: dt.date
    seq: int | None
    """Of its last attempt: marks the settlement as ours. None: it never reached an engine."""

    @property
    def row(self) -> ResultRow:
        return self.settlement.result


class Settling:
    """Settles batches. Thread-safe; keeps no state between them."""

    def __init__(self, database: Database, days: partitions.Days) -> None:
        self._database = database
        self._days = days

    def settle(self, batch: Sequence[Settlement]) -> list[Verdict]:
        """See ``Store.settle``."""
        for settlement in batch:
            _prepare(settlement)
        order = sorted(range(len(batch)), key=lambda i: (batch[i].result.key, batch[i].result.status not in ANSWERS, i))
        verdicts: dict[int, Verdict] = {}
        if batch:
            self._settle([(batch[place], place) for place in order], verdicts)
        return [verdicts[place] for place in range(len(batch))]

    def _settle(self, batch: Sequence[tuple[Settlement, int]], verdicts: dict[int, Verdict]) -> None:
        try:
            verdicts.update(self._commit(batch))
        except (exc.SQLAlchemyError, psycopg.Error, ValueError, OverflowError) as error:
            if not is_data_error(error):
                raise
            if len(batch) == 1:
                verdicts.update(self._settle_unstorable(*batch[0], error))
            else:
                middle = len(batch) // 2
                self._settle(batch[:middle], verdicts)
                self._settle(batch[middle:], verdicts)

    def _commit(self, batch: Sequence[tuple[Settlement, int]]) -> dict[int, Verdict]:
        entries = [_entry(settlement, place) for settlement, place in batch]
        days = {entry.day for entry in entries}
        days.update(day_at(attempt.ended_ms) for entry in entries for attempt in entry.settlement.attempts)
        return self._days.run(days, lambda connection: _write(connection, entries))

    def _settle_unstorable(self, settlement: Settlement, place: int, error: BaseException) -> dict[int, Verdict]:
        """One row that the database refuses: told apart from a forgotten key, then stored bare."""
        row = settlement.result
        constraint = getattr(getattr(original(error), "diag", None), "constraint_name", None) or ""
        bare = _bare(settlement, error)
        nameless = msgspec.structs.replace(bare.result, id=None)  # its id may be too long for the index
        candidates = [bare, Settlement(nameless, bare.attempts), Settlement(bare.result), Settlement(nameless)]
        if constraint.startswith("results_") and constraint.endswith("_pkey"):
            found = {"day": day_at(row.appended_ms), "key": row.key}
            self._database.run(lambda connection: connection.execute(statements.REMEMBER_AGAIN, found))
            candidates.insert(0, settlement)
        for candidate in candidates:
            try:
                return self._commit([(candidate, place)])
            except (exc.SQLAlchemyError, psycopg.Error, ValueError, OverflowError) as again:
                if not is_data_error(again):
                    raise
                error = again
        raise error


def _prepare(settlement: Settlement) -> None:
    """Text that Postgres can hold; the charge is that of the attempts, whatever the row says."""
    row = settlement.result
    row.clean()
    row.charge_usd = ZERO_USD
    for attempt in settlement.attempts:
        if attempt.waste is None:
            row.charge_usd = _EXACT.add(row.charge_usd, attempt.charge_usd)
    row.settled_ms = row.settled_ms or int(time.time() * 1000)


def _entry(settlement: Settlement, place: int) -> _Entry:
    row, tries = settlement.result, settlement.attempts
    seq = tries[-1].seq if tries else None
    return _Entry(settlement, place, row.key.lower(), row.record, day_at(row.appended_ms), seq)


def _bare(settlement: Settlement, error: BaseException) -> Settlement:
    """What can be stored of a row that cannot: who and where it was, that it failed, and the time it took."""
    row = settlement.result
    bare = ResultRow(
        key=row.key,
        id=row.id,
        source=row.source,
        pool=row.pool,
        class_name=row.class_name,
        bucket=row.bucket,
        business_line=row.business_line,
        type=row.type,
        status=Status.FAILED,
        error_code=UNSTORABLE,
        error_message=clean_text(f"the database cannot hold this result: {message_of(error)}")[:_MESSAGE_CHARS],
        worker=clean_text(row.worker),
        worker_epoch=row.worker_epoch,
        topic=row.topic,
        partition=row.partition,
        offset=row.offset,
        appended_ms=row.appended_ms,
        settled_ms=row.settled_ms,
    )
    tries = [
        msgspec.structs.replace(attempt, waste=attempt.waste or Waste.RETRY, charge_usd=ZERO_USD, tariff_id=None)
        for attempt in settlement.attempts
    ]
    return Settlement(bare, tries)


# -- inside the transaction -----------------------------------------------------------------------


def _write(connection: sa.Connection, entries: Sequence[_Entry]) -> dict[int, Verdict]:
    """The whole settlement, on rows sorted by key. Changes nothing in ``entries``: it may run again."""
    epochs = sorted({entry.row.worker_epoch for entry in entries})
    if len(connection.execute(statements.LOCK_OPEN_WORKERS, {"epochs": epochs}).all()) != len(epochs):
        raise Fenced(f"an epoch of {epochs} was closed by another: its work was taken over")
    won = _win_keys(connection, entries)
    winners = [(entry, won[entry.place]) for entry in entries if entry.place in won]
    losers = [entry for entry in entries if entry.place not in won]
    _copy(connection, statements.COPY_RESULTS, [result_values(e.row, e.key, generation) for e, generation in winners])
    tries = [
        attempt_values(attempt, entry.row, entry.key, generation)
        for entry, generation in winners
        for attempt in entry.settlement.attempts
    ]
    _copy(connection, statements.COPY_ATTEMPTS, tries)
    verdicts = _lose(connection, losers, {entry.key for entry, _ in winners}) if losers else {}
    for entry, generation in winners:
        entry.row.generation = generation
        verdicts[entry.place] = Verdict(True, entry.row)
    return verdicts


def _win_keys(connection: sa.Connection, entries: Sequence[_Entry]) -> dict[int, int]:
    """Place → generation of the entries that won their key. A round for each time a refused key repeats."""
    won: dict[int, int] = {}
    waiting = list(entries)
    while waiting:
        now: dict[str, _Entry] = {}
        later = []
        for entry in waiting:
            if entry.key in now:
                later.append(entry)
            else:
                now[entry.key] = entry
        for key, generation in connection.execute(statements.SETTLE, _settle_parameters(now.values())):
            won[now[key].place] = generation
        if later:
            # Those that repeat an answered key have lost: a flood of one id must not take a round each.
            keys = {"keys": sorted({entry.key for entry in later})}
            answered = set(connection.execute(statements.ANSWERED, keys).scalars())
            later = [entry for entry in later if entry.key not in answered]
        waiting = later
    return won


def _settle_parameters(entries: Collection[_Entry]) -> dict[str, str]:
    rows = [entry.settlement.result for entry in entries]
    return {
        "keys": words([entry.key for entry in entries]),
        "outcomes": words([row.status.value for row in rows]),
        "reasons": texts([row.error_code for row in rows]),
        "days": words([entry.day for entry in entries]),
        "records": texts([entry.record for entry in entries]),
        "epochs": words([row.worker_epoch for row in rows]),
        "seqs": words(["NULL" if entry.seq is None else entry.seq for entry in entries]),
    }


def _lose(connection: sa.Connection, losers: Sequence[_Entry], won_here: set[str]) -> dict[int, Verdict]:
    """Verdicts of entries that did not win: our own from before (won), or another's (time is waste)."""
    keys = {"keys": sorted({entry.key for entry in losers})}
    stored = {row.key: row for row in connection.execute(statements.STORED, keys)}
    found = connection.execute(statements.VISIBLE_RESULTS, keys).all()
    visible = {row.key: (row.day, result_from(row)) for row in found}
    verdicts: dict[int, Verdict] = {}
    wasted: list[dict[str, Any]] = []
    for entry in losers:
        row, winner = entry.row, stored[entry.key]
        day, result = visible.get(entry.key, (winner.day, None))
        ours = (winner.winner_epoch, winner.winner_seq, winner.record) == (row.worker_epoch, entry.seq, entry.record)
        if ours and entry.key not in won_here:
            won_here.add(entry.key)  # only once, should its record be in the batch twice
            if result is None or result.status == row.status:
                # Ours, and with the output that ``keep_output`` may have left out of the table.
                row.generation, result = winner.generation, row
            verdicts[entry.place] = Verdict(True, result)
            continue
        verdicts[entry.place] = Verdict(False, result or _not_kept(row, winner.generation))
        for attempt in entry.settlement.attempts:
            values = attempt_values(
                attempt, row, entry.key, winner.generation, result_day=day.isoformat(), waste=Waste.DUPLICATE
            )
            wasted.append(dict(zip(statements.ATTEMPT_COLUMNS, values, strict=True)))
    if wasted:
        connection.execute(statements.ADD_ATTEMPTS, wasted)
    return verdicts


def _not_kept(row: ResultRow, generation: int) -> ResultRow:
    """Another answered this key and retention took its result: ours goes out in its place, uncharged."""
    return msgspec.structs.replace(row, generation=generation, charge_usd=ZERO_USD)


def _copy(connection: sa.Connection, statement: bytes, rows: Sequence[tuple[Any, ...]]) -> None:
    if not rows:
        return
    with driver(connection).cursor() as cursor, cursor.copy(statement) as copy:
        for row in rows:
            copy.write_row(row)
