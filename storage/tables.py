"""The tables, declared once. Migrations must give exactly these (a test compares the two).

``results`` and ``attempts`` are partitioned by day. The day of a result is that of its record's
append time, stable over redelivery; the day of an attempt is the one on which it used the GPU, so
that money and the ledger are dropped together. Columns of times are integer ms since the epoch,
columns of engine time integer ns, money is exact ``numeric``.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg

from contract.statuses import Status, Waste

metadata = sa.MetaData(
    naming_convention={
        "ix": "%(table_name)s_%(column_0_N_name)s_idx",
        "uq": "%(table_name)s_%(column_0_N_name)s_key",
        "ck": "%(table_name)s_%(constraint_name)s_check",
        "pk": "%(table_name)s_pkey",
    }
)


def _one_of(column: str, words: Iterable[enum.StrEnum]) -> sa.CheckConstraint:
    """The database's mirror of an enum."""
    listed = ", ".join(f"'{word}'" for word in words)
    return sa.CheckConstraint(f"{column} IN ({listed})", name=column)


def _text(name: str, *, null: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=null)


def _big(name: str, *, null: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=null)


def _int(name: str, *, null: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.Integer, nullable=null)


def _flag(name: str) -> sa.Column[bool]:
    return sa.Column(name, sa.Boolean, nullable=False)


workers = sa.Table(
    "workers",
    metadata,
    sa.Column("epoch", sa.BigInteger, sa.Identity(always=True), primary_key=True),
    _text("name"),
    _text("pool"),
    _text("gpu_kind"),
    _big("started_ms"),
    sa.Column("heartbeat_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
    sa.Column("provisioned_ns", sa.BigInteger, nullable=False, server_default=sa.text("0")),
    sa.Column("lost_ns", sa.BigInteger, nullable=False, server_default=sa.text("0")),
    sa.Column("closed_at", sa.DateTime(timezone=True)),
    _text("closed_reason", null=True),
    sa.CheckConstraint("closed_reason IN ('stopped', 'dead')", name="closed_reason"),
    comment="One row per life of a worker process. A closed epoch may settle nothing any more.",
)

worker_time = sa.Table(
    "worker_time",
    metadata,
    sa.Column("worker_epoch", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
    _big("at_ms"),
    _big("starting_ns"),
    _big("idle_ns"),
    _big("busy_ns"),
    _big("draining_ns"),
    _big("stalled_ns"),
    _big("rounding_ns"),
    comment="Where a worker's time went since its previous row.",
)

claims = sa.Table(
    "claims",
    metadata,
    sa.Column("worker_epoch", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("topic", sa.Text, primary_key=True),
    sa.Column("partition", sa.Integer, primary_key=True, autoincrement=False),
    _big("first_offset"),
    _big("last_offset"),
    sa.Column("claimed_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
    comment="Offsets in a worker's hands. A trace, not a lock.",
)

suspects = sa.Table(
    "suspects",
    metadata,
    sa.Column("key", sa.Uuid(as_uuid=False), primary_key=True),
    _int("deaths"),
    _big("worker_epoch", null=True),
    sa.Column("noted_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
    comment="Requests that were at hand when an engine or a worker died. worker_epoch: in whose engine it is now.",
)

settled = sa.Table(
    "settled",
    metadata,
    sa.Column("key", sa.Uuid(as_uuid=False), primary_key=True),
    _int("generation"),
    _text("outcome"),
    _text("reason", null=True),
    sa.Column("day", sa.Date, nullable=False),
    sa.Column("records", pg.ARRAY(sa.Text), nullable=False),
    _big("winner_epoch"),
    _big("winner_seq", null=True),
    sa.Column("settled_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
    _one_of("outcome", Status),
    comment="Decides who answers a key. One row per key, whatever its generation.",
)

results = sa.Table(
    "results",
    metadata,
    sa.Column("day", sa.Date, primary_key=True),
    sa.Column("key", sa.Uuid(as_uuid=False), primary_key=True),
    sa.Column("generation", sa.Integer, primary_key=True, autoincrement=False),
    _text("id", null=True),
    _text("source"),
    _flag("verified"),
    _text("pool"),
    _text("class"),
    _text("bucket"),
    _text("business_line"),
    _text("type"),
    _text("model", null=True),
    _text("status"),
    _text("error_code", null=True),
    _text("error_message", null=True),
    _text("error_param", null=True),
    sa.Column("output", pg.JSON, nullable=True),
    _flag("altered"),
    _flag("keep_output"),
    _big("prompt_tokens"),
    _big("cached_tokens"),
    _big("output_tokens"),
    _flag("usage_contradictory"),
    sa.Column("latency_ms", sa.Double, nullable=False),
    sa.Column("queue_ms", sa.Double, nullable=False),
    sa.Column("inference_ms", sa.Double, nullable=False),
    sa.Column("charge_usd", sa.Numeric, nullable=False),
    _int("degrade_level"),
    _int("attempt"),
    _text("worker"),
    _big("worker_epoch"),
    sa.Column("tags", pg.JSONB, nullable=True),
    _text("batch_id", null=True),
    _text("custom_id", null=True),
    _text("topic"),
    _int("partition"),
    _big("record_offset"),
    _big("appended_ms"),
    _big("settled_ms"),
    _one_of("status", Status),
    sa.Index(None, "id"),
    postgresql_partition_by="RANGE (day)",
    comment="What became of each request, one row per generation.",
)

attempts = sa.Table(
    "attempts",
    metadata,
    sa.Column("day", sa.Date, primary_key=True),
    sa.Column("worker_epoch", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("key", sa.Uuid(as_uuid=False), nullable=True),
    _int("generation", null=True),
    sa.Column("result_day", sa.Date, nullable=True),
    _text("pool"),
    _text("class", null=True),
    _text("bucket", null=True),
    _text("business_line", null=True),
    _text("source", null=True),
    _text("type", null=True),
    _text("model", null=True),
    _int("number"),
    _text("waste", null=True),
    _big("allocated_ns"),
    sa.Column("charge_usd", sa.Numeric, nullable=False),
    _big("tariff_id", null=True),
    _big("prompt_tokens"),
    _big("cached_tokens"),
    _big("output_tokens"),
    _big("started_ms"),
    _big("ended_ms"),
    _one_of("waste", Waste),
    sa.CheckConstraint("waste IS NULL OR charge_usd = 0", name="waste_is_free"),
    sa.CheckConstraint("key IS NOT NULL OR waste IS NOT NULL", name="keyless_is_waste"),
    postgresql_partition_by="RANGE (day)",
    comment="Each try in an engine: its share of GPU time and its charge. What reports need is copied here.",
)

gpu_prices = sa.Table(
    "gpu_prices",
    metadata,
    sa.Column("gpu_kind", sa.Text, primary_key=True),
    sa.Column("valid_from", sa.DateTime(timezone=True), primary_key=True),
    sa.Column("usd_per_hour", sa.Numeric, nullable=False),
    comment="What an hour of a worker costs us. A row holds until the next one of its kind.",
)

tariffs = sa.Table(
    "tariffs",
    metadata,
    sa.Column("tariff_id", sa.BigInteger, sa.Identity(always=True), primary_key=True),
    _text("model", null=True),
    sa.Column("valid_from", sa.DateTime(timezone=True), nullable=False),
    sa.Column("input_usd", sa.Numeric, nullable=False),
    sa.Column("cached_input_usd", sa.Numeric, nullable=False),
    sa.Column("output_usd", sa.Numeric, nullable=False),
    sa.UniqueConstraint("model", "valid_from", postgresql_nulls_not_distinct=True),
    comment="What a tenant pays per million tokens. model NULL: every model without rows of its own.",
)
