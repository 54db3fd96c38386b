"""The first tables."""

from __future__ import annotations

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TABLES = """
CREATE TABLE workers (
    epoch BIGINT GENERATED ALWAYS AS IDENTITY,
    name TEXT NOT NULL,
    pool TEXT NOT NULL,
    gpu_kind TEXT NOT NULL,
    started_ms BIGINT NOT NULL,
    heartbeat_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    provisioned_ns BIGINT DEFAULT 0 NOT NULL,
    lost_ns BIGINT DEFAULT 0 NOT NULL,
    closed_at TIMESTAMP WITH TIME ZONE,
    closed_reason TEXT,
    CONSTRAINT workers_pkey PRIMARY KEY (epoch),
    CONSTRAINT workers_closed_reason_check CHECK (closed_reason IN ('stopped', 'dead'))
);
COMMENT ON TABLE workers IS
    'One row per life of a worker process. A closed epoch may settle nothing any more.';

CREATE TABLE worker_time (
    worker_epoch BIGINT NOT NULL,
    seq BIGINT NOT NULL,
    at_ms BIGINT NOT NULL,
    starting_ns BIGINT NOT NULL,
    idle_ns BIGINT NOT NULL,
    busy_ns BIGINT NOT NULL,
    draining_ns BIGINT NOT NULL,
    stalled_ns BIGINT NOT NULL,
    rounding_ns BIGINT NOT NULL,
    CONSTRAINT worker_time_pkey PRIMARY KEY (worker_epoch, seq)
);
COMMENT ON TABLE worker_time IS
    'Where a worker''s time went since its previous row.';

CREATE TABLE claims (
    worker_epoch BIGINT NOT NULL,
    topic TEXT NOT NULL,
    partition INTEGER NOT NULL,
    first_offset BIGINT NOT NULL,
    last_offset BIGINT NOT NULL,
    claimed_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT claims_pkey PRIMARY KEY (worker_epoch, topic, partition)
);
COMMENT ON TABLE claims IS
    'Offsets in a worker''s hands. A trace, not a lock.';

CREATE TABLE suspects (
    key UUID NOT NULL,
    deaths INTEGER NOT NULL,
    worker_epoch BIGINT,
    noted_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT suspects_pkey PRIMARY KEY (key)
);
COMMENT ON TABLE suspects IS
    'Requests that were at hand when an engine or a worker died. worker_epoch: in whose engine it is now.';

CREATE TABLE settled (
    key UUID NOT NULL,
    generation INTEGER NOT NULL,
    outcome TEXT NOT NULL,
    reason TEXT,
    day DATE NOT NULL,
    records TEXT[] NOT NULL,
    winner_epoch BIGINT NOT NULL,
    winner_seq BIGINT,
    settled_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT settled_pkey PRIMARY KEY (key),
    CONSTRAINT settled_outcome_check
        CHECK (outcome IN ('ok', 'degraded', 'cached', 'invalid', 'failed', 'expired', 'shed', 'cancelled', 'ai_off'))
);
COMMENT ON TABLE settled IS
    'Decides who answers a key. One row per key, whatever its generation.';

CREATE TABLE results (
    day DATE NOT NULL,
    key UUID NOT NULL,
    generation INTEGER NOT NULL,
    id TEXT,
    source TEXT NOT NULL,
    verified BOOLEAN NOT NULL,
    pool TEXT NOT NULL,
    class TEXT NOT NULL,
    bucket TEXT NOT NULL,
    business_line TEXT NOT NULL,
    type TEXT NOT NULL,
    model TEXT,
    status TEXT NOT NULL,
    error_code TEXT,
    error_message TEXT,
    error_param TEXT,
    output JSON,
    altered BOOLEAN NOT NULL,
    keep_output BOOLEAN NOT NULL,
    prompt_tokens BIGINT NOT NULL,
    cached_tokens BIGINT NOT NULL,
    output_tokens BIGINT NOT NULL,
    usage_contradictory BOOLEAN NOT NULL,
    latency_ms DOUBLE PRECISION NOT NULL,
    queue_ms DOUBLE PRECISION NOT NULL,
    inference_ms DOUBLE PRECISION NOT NULL,
    charge_usd NUMERIC NOT NULL,
    degrade_level INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    worker TEXT NOT NULL,
    worker_epoch BIGINT NOT NULL,
    tags JSONB,
    batch_id TEXT,
    custom_id TEXT,
    topic TEXT NOT NULL,
    partition INTEGER NOT NULL,
    record_offset BIGINT NOT NULL,
    appended_ms BIGINT NOT NULL,
    settled_ms BIGINT NOT NULL,
    CONSTRAINT results_pkey PRIMARY KEY (day, key, generation),
    CONSTRAINT results_status_check
        CHECK (status IN ('ok', 'degraded', 'cached', 'invalid', 'failed', 'expired', 'shed', 'cancelled', 'ai_off'))
) PARTITION BY RANGE (day);
CREATE INDEX results_id_idx ON results (id);
COMMENT ON TABLE results IS
    'What became of each request, one row per generation.';

CREATE TABLE attempts (
    day DATE NOT NULL,
    worker_epoch BIGINT NOT NULL,
    seq BIGINT NOT NULL,
    key UUID,
    generation INTEGER,
    result_day DATE,
    pool TEXT NOT NULL,
    class TEXT,
    bucket TEXT,
    business_line TEXT,
    source TEXT,
    type TEXT,
    model TEXT,
    number INTEGER NOT NULL,
    waste TEXT,
    allocated_ns BIGINT NOT NULL,
    charge_usd NUMERIC NOT NULL,
    tariff_id BIGINT,
    prompt_tokens BIGINT NOT NULL,
    cached_tokens BIGINT NOT NULL,
    output_tokens BIGINT NOT NULL,
    started_ms BIGINT NOT NULL,
    ended_ms BIGINT NOT NULL,
    CONSTRAINT attempts_pkey PRIMARY KEY (day, worker_epoch, seq),
    CONSTRAINT attempts_waste_check
        CHECK (waste IN ('retry', 'duplicate', 'aborted', 'engine_death', 'crash', 'warm_up', 'shadow')),
    CONSTRAINT attempts_waste_is_free_check CHECK (waste IS NULL OR charge_usd = 0),
    CONSTRAINT attempts_keyless_is_waste_check CHECK (key IS NOT NULL OR waste IS NOT NULL)
) PARTITION BY RANGE (day);
COMMENT ON TABLE attempts IS
    'Each try in an engine: its share of GPU time and its charge. What reports need is copied here.';

CREATE TABLE gpu_prices (
    gpu_kind TEXT NOT NULL,
    valid_from TIMESTAMP WITH TIME ZONE NOT NULL,
    usd_per_hour NUMERIC NOT NULL,
    CONSTRAINT gpu_prices_pkey PRIMARY KEY (gpu_kind, valid_from)
);
COMMENT ON TABLE gpu_prices IS
    'What an hour of a worker costs us. A row holds until the next one of its kind.';

CREATE TABLE tariffs (
    tariff_id BIGINT GENERATED ALWAYS AS IDENTITY,
    model TEXT,
    valid_from TIMESTAMP WITH TIME ZONE NOT NULL,
    input_usd NUMERIC NOT NULL,
    cached_input_usd NUMERIC NOT NULL,
    output_usd NUMERIC NOT NULL,
    CONSTRAINT tariffs_pkey PRIMARY KEY (tariff_id),
    CONSTRAINT tariffs_model_valid_from_key UNIQUE NULLS NOT DISTINCT (model, valid_from)
);
COMMENT ON TABLE tariffs IS
    'What a tenant pays per million tokens. model NULL: every model without rows of its own.';
"""


def upgrade() -> None:
    op.execute(TABLES)


def downgrade() -> None:
    op.execute("DROP TABLE tariffs")
    op.execute("DROP TABLE gpu_prices")
    op.execute("DROP TABLE attempts")
    op.execute("DROP TABLE results")
    op.execute("DROP TABLE settled")
    op.execute("DROP TABLE suspects")
    op.execute("DROP TABLE claims")
    op.execute("DROP TABLE worker_time")
    op.execute("DROP TABLE workers")
