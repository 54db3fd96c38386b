"""Sizes of records, against an independent writer of Kafka's format."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from kafka.record.default_records import DefaultRecordBatchBuilder

from broker import records

sizes = st.one_of(st.integers(0, 200), st.sampled_from([63, 64, 65, 8_190, 8_191, 8_192, 1_048_575, 1_048_576]))
keys = st.one_of(st.none(), st.binary(max_size=80))
headers = st.lists(st.tuples(st.text(max_size=20), st.binary(max_size=100)), max_size=70)


def written_bytes(key: bytes | None, value: bytes | None, pairs: list[tuple[str, bytes | None]]) -> int:
    builder = DefaultRecordBatchBuilder(
        magic=2, compression_type=0, is_transactional=0, producer_id=7, producer_epoch=0, base_sequence=0,
        batch_size=10_000_000,
    )  # fmt: skip
    assert builder.append(0, 1_700_000_000_000, key, value, pairs) is not None
    return len(builder.build())


@given(keys, sizes, headers)
def test_size_equals_what_is_written(
    key: bytes | None, value_bytes: int, pairs: list[tuple[str, bytes | None]]
) -> None:
    value = b"v" * value_bytes
    assert records.record_bytes(key, value, pairs) == written_bytes(key, value, pairs)


@given(keys, sizes, headers, st.integers(-2, 2))
def test_cheap_answer_equals_the_exact_one_around_the_limit(
    key: bytes | None, value_bytes: int, pairs: list[tuple[str, bytes | None]], off: int
) -> None:
    value = b"v" * value_bytes
    exact = records.record_bytes(key, value, pairs)
    assert records.fits(key, value, pairs, exact + off) == (off >= 0)


def test_null_value_and_null_header_take_one_byte_each() -> None:
    assert records.record_bytes(b"k", None, []) == records.record_bytes(b"k", b"", [])
    assert records.record_bytes(b"k", b"", [("h", None)]) == records.record_bytes(b"k", b"", [("h", b"")])
