"""The pure parts of storage: mapping, amounts, which errors are worth another try."""

from __future__ import annotations

import datetime as dt
import inspect
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import msgspec
import psycopg
import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from contract.messages import ErrorBody, parse_result
from contract.money import NS_PER_HOUR
from contract.statuses import Status, Waste
from headrace.commands._output import Moment, cell, epoch_ms, text_table
from storage import tables
from storage.cost import decimal_usd
from storage.database import is_data_error, message_of, retry_reason
from storage.mapping import attempt_values, day_at, keyless_attempt, result_from, result_values
from storage.partitions import name_of
from storage.reports import Amount
from storage.rows import AttemptRow, ResultRow, day_of
from storage.statements import ATTEMPT_COLUMNS, RESULT_COLUMNS


def distinct(cls: type[Any], **given: Any) -> Any:
    """An instance in which every field has a value of its own, so that two swapped ones show."""
    kinds: dict[str, Callable[[int], Any]] = {
        "int": lambda n: n,
        "float": lambda n: n + 0.5,
        "bool": lambda n: True,
        "Decimal": lambda n: Decimal(n),
    }
    values = {}
    for number, (name, type_) in enumerate(inspect.get_annotations(cls).items(), 100):
        make = kinds.get(str(type_).split(" ")[0])
        values[name] = make(number) if make else f"text {number}"
    return cls(**values | given)


ROW: ResultRow = distinct(
    ResultRow,
    key="5616e010-f5df-45ce-be99-4838107b9d1b",
    status=Status.DEGRADED,
    output=b'{"a":"\\u00e9"}',
    tags={"b": "c"},
    appended_ms=1_700_000_000_000,
)
ATTEMPT: AttemptRow = distinct(AttemptRow, waste=None, ended_ms=1_700_086_400_000)


def test_a_result_comes_back_from_its_columns_as_it_went_in() -> None:
    values = result_values(ROW, ROW.key, ROW.generation)
    assert len(values) == len(RESULT_COLUMNS)
    assert result_from(values) == ROW


@pytest.mark.parametrize("reference", [None, "results/2026-01-01/key/1"])
def test_a_result_on_the_wire_says_what_its_row_says(reference: str | None) -> None:
    result = parse_result(ROW.to_result(reference=reference))
    assert (result.key, result.status, result.worker, result.tags) == (ROW.key, ROW.status, ROW.worker, ROW.tags)
    assert result.error == ErrorBody(code=ROW.error_code or "", message=ROW.error_message or "", param=ROW.error_param)
    assert (result.output, result.output_ref) == ((None, reference) if reference else ({"a": "é"}, None))
    assert Decimal(result.cost_usd) == ROW.charge_usd


def test_each_result_value_stands_under_its_columns_name() -> None:
    named = dict(zip(RESULT_COLUMNS, result_values(ROW, ROW.key, 7), strict=True))
    renamed = {"class": ROW.class_name, "record_offset": ROW.offset, "day": "2023-11-14", "generation": 7}
    renamed |= {"output": '{"a":"\\u00e9"}', "tags": '{"b":"c"}'}
    for name, value in named.items():
        assert value == (renamed[name] if name in renamed else getattr(ROW, name)), name


def test_each_attempt_value_stands_under_its_columns_name() -> None:
    named = dict(zip(ATTEMPT_COLUMNS, attempt_values(ATTEMPT, ROW, ROW.key, 7), strict=True))
    of_row = {
        name: getattr(ROW, name) for name in ("pool", "bucket", "business_line", "source", "type", "model", "key")
    }
    expected = of_row | {
        "class": ROW.class_name,
        "generation": 7,
        "day": "2023-11-15",
        "result_day": "2023-11-14",
    }
    for name, value in named.items():
        assert value == (expected[name] if name in expected else getattr(ATTEMPT, name)), name


def test_waste_is_free_and_keeps_its_own_reason() -> None:
    charge, waste = ATTEMPT_COLUMNS.index("charge_usd"), ATTEMPT_COLUMNS.index("waste")
    lost = attempt_values(ATTEMPT, ROW, ROW.key, 1, waste=Waste.DUPLICATE)
    assert (lost[waste], lost[charge]) == ("duplicate", 0)
    retried = attempt_values(
        msgspec.structs.replace(ATTEMPT, waste=Waste.RETRY), ROW, ROW.key, 1, waste=Waste.DUPLICATE
    )
    assert (retried[waste], retried[charge]) == ("retry", 0)
    line = keyless_attempt(ATTEMPT, "pool", Waste.CRASH)
    assert (line["waste"], line["charge_usd"], line["key"], line["allocated_ns"]) == (
        "crash",
        0,
        None,
        ATTEMPT.allocated_ns,
    )
    assert set(line) == set(tables.attempts.columns.keys())


@given(st.integers(0, 253_402_214_399_999))
def test_days_remembered_are_days_computed(time_ms: int) -> None:
    assert day_at(time_ms) == day_of(time_ms)


def test_a_time_that_is_none_counts_as_the_nearest_that_is() -> None:
    assert day_at(-1) == dt.date(1970, 1, 1)
    assert day_at(2**63 - 1) == dt.date(9999, 12, 30)


def test_partition_names_sort_by_day_and_read_back() -> None:
    assert name_of("results", dt.date(2026, 3, 9)) == "results_2026_03_09"
    assert name_of("attempts", dt.date(1, 1, 1)) == "attempts_0001_01_01"


def database_error(cause: type[psycopg.Error]) -> sa.exc.DBAPIError:
    return sa.exc.DBAPIError("SELECT secret", {"p": "secret"}, cause("first line\nDETAIL: secret"))


@pytest.mark.parametrize(
    ("cause", "reason", "data"),
    [
        (psycopg.errors.DeadlockDetected, "deadlock", False),
        (psycopg.errors.SerializationFailure, "serialization", False),
        (psycopg.errors.LockNotAvailable, "timeout", False),
        (psycopg.errors.QueryCanceled, "timeout", False),
        (psycopg.errors.AdminShutdown, "connection", False),
        (psycopg.errors.CannotConnectNow, "connection", False),
        (psycopg.errors.ConnectionFailure, "connection", False),
        (psycopg.errors.TooManyConnections, "connection", False),
        (psycopg.errors.DiskFull, "connection", False),
        (psycopg.errors.ReadOnlySqlTransaction, "connection", False),
        (psycopg.errors.IdleInTransactionSessionTimeout, "connection", False),
        (psycopg.OperationalError, "connection", False),
        (psycopg.InterfaceError, "connection", False),
        (psycopg.errors.UniqueViolation, None, True),
        (psycopg.errors.NumericValueOutOfRange, None, True),
        (psycopg.errors.UntranslatableCharacter, None, True),
        (psycopg.errors.ProgramLimitExceeded, None, True),
        (psycopg.DataError, None, True),
        (psycopg.errors.UndefinedTable, None, False),
        (psycopg.errors.SyntaxError, None, False),
    ],
)
def test_errors_are_judged_by_code_wrapped_or_not(cause: type[psycopg.Error], reason: str | None, data: bool) -> None:
    for error in (cause("x"), database_error(cause)):
        assert retry_reason(error) == reason
        assert is_data_error(error) is data


def test_messages_of_errors_hold_no_statement_and_no_data() -> None:
    assert message_of(database_error(psycopg.errors.UniqueViolation)) == "first line"


@given(st.integers(-(10**18), 10**18), st.integers(1, 10**6))
def test_shown_amounts_are_within_half_a_digit_and_never_in_exponents(ns: int, cents_per_hour: int) -> None:
    exact = Fraction(ns) * Fraction(cents_per_hour, 100) / NS_PER_HOUR
    shown = decimal_usd(exact)
    assert "E" not in shown
    assert abs(Fraction(shown) - exact) <= Fraction(1, 2 * 10**12)


def test_amounts_add_and_subtract() -> None:
    one, two = Amount(1, Fraction(1, 3)), Amount(2, Fraction(2, 3))
    assert one + two - two == one


def test_tables_line_up_and_numbers_stand_to_the_right() -> None:
    assert text_table(["name", "n"], [["a", 5], ["long", 1234], ["b", None]]).splitlines() == [
        "name     n",
        "----  ----",
        "a        5",
        "long  1234",
        "b",
    ]
    assert text_table(["empty"], []) == "empty\n-----"
    assert cell("a\tb\x9b") == "a\\x09b\\x9b"
    assert cell({"a": [1]}) == '{"a":[1]}'


def test_moments_are_utc_unless_they_say_otherwise() -> None:
    def ms(text: str) -> int | None:
        return epoch_ms(Moment().convert(text, None, None))

    assert ms("1970-01-02") == 86_400_000
    assert ms("1970-01-01T02:00:00+02:00") == 0
    assert ms("1970-01-01T00:00:01Z") == 1_000
    assert epoch_ms(None) is None
