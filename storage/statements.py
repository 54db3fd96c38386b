"""Every statement of the store, each with a name and a reason. Nothing else writes to these tables
(``partitions`` makes and drops them; ``reports`` and ``reconcile`` only read).
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql as pg

from contract.statuses import ANSWERS
from storage.tables import attempts, results

_ANSWERS = ", ".join(f"'{status}'" for status in sorted(ANSWERS))

# -- workers and their time -----------------------------------------------------------------------

REGISTER_WORKER = sa.text(
    "INSERT INTO workers (name, pool, gpu_kind, started_ms) VALUES (:name, :pool, :gpu_kind, :started_ms)"
    " RETURNING epoch"
)

BEAT = sa.text(
    "UPDATE workers SET heartbeat_at = now(), provisioned_ns = greatest(provisioned_ns, :provisioned_ns)"
    " WHERE epoch = :epoch AND closed_at IS NULL RETURNING pool"
)
"""No row: the epoch is closed, its worker fenced."""

ADD_TIME = sa.text("""
    INSERT INTO worker_time (worker_epoch, seq, at_ms, starting_ns, idle_ns, busy_ns, draining_ns, stalled_ns,
                             rounding_ns)
    VALUES (:worker_epoch, :seq, :at_ms, :starting_ns, :idle_ns, :busy_ns, :draining_ns, :stalled_ns, :rounding_ns)
    ON CONFLICT DO NOTHING
""")
"""A row sent twice, because the reply to the first was lost, counts once."""

CLOSE_WORKER = sa.text("UPDATE workers SET closed_at = now(), closed_reason = 'stopped' WHERE epoch = :epoch")

IS_STOPPED = sa.text("SELECT closed_reason = 'stopped' FROM workers WHERE epoch = :epoch")
"""Tells a repeated ``close_worker`` whose first reply was lost from one that was fenced."""

LOCK_DEAD = sa.text("""
    SELECT w.epoch, w.pool, w.started_ms, w.provisioned_ns,
           coalesce(sum(t.starting_ns + t.idle_ns + t.busy_ns + t.draining_ns + t.stalled_ns), 0)::bigint AS told_ns,
           coalesce(sum(t.busy_ns), 0)::bigint AS busy_ns, coalesce(sum(t.rounding_ns), 0)::bigint AS rounding_ns,
           coalesce(max(t.seq), 0) AS last_seq, coalesce(max(t.at_ms), w.started_ms) AS last_ms
    FROM (SELECT * FROM workers
          WHERE closed_at IS NULL AND heartbeat_at < now() - make_interval(secs => :dead_after_s)
          ORDER BY epoch FOR UPDATE SKIP LOCKED) w
    LEFT JOIN worker_time t ON t.worker_epoch = w.epoch
    GROUP BY w.epoch, w.pool, w.started_ms, w.provisioned_ns ORDER BY w.epoch
""")
"""Silent workers, by the server's clock. FOR UPDATE waits for nobody and lets no settlement of theirs begin."""

ALLOCATED = sa.text(
    "SELECT coalesce(sum(allocated_ns), 0)::bigint FROM attempts WHERE worker_epoch = :epoch AND day >= :first_day"
)

BURY = sa.text("""
    UPDATE workers SET closed_at = now(), closed_reason = 'dead', provisioned_ns = :provisioned_ns, lost_ns = :lost_ns
    WHERE epoch = :epoch AND closed_at IS NULL
""")

# -- claims ---------------------------------------------------------------------------------------

LOOK_UP = sa.text("""
    WITH relaxed AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true) AS done),
    claimed AS (
        INSERT INTO claims (worker_epoch, topic, partition, first_offset, last_offset)
        SELECT :epoch, c.topic, c.partition, c.first_offset, c.last_offset
        FROM relaxed, unnest(CAST(:topics AS text[]), CAST(:partitions AS int[]), CAST(:firsts AS bigint[]),
                             CAST(:lasts AS bigint[])) AS c (topic, partition, first_offset, last_offset)
        WHERE EXISTS (SELECT 1 FROM workers WHERE epoch = :epoch AND closed_at IS NULL)
        ON CONFLICT (worker_epoch, topic, partition) DO UPDATE
        SET first_offset = excluded.first_offset, last_offset = excluded.last_offset, claimed_at = now()
    )
    SELECT key, generation, outcome, day, records, NULL AS deaths, NULL AS worker_epoch
    FROM settled WHERE key = ANY (CAST(:keys AS uuid[]))
    UNION ALL
    SELECT key, NULL, NULL, NULL, NULL, deaths, worker_epoch FROM suspects WHERE key = ANY (CAST(:keys AS uuid[]))
""")
"""Claims and memory in one statement. A claim need not wait for its disk: it is a trace, not a lock. A closed
epoch claims nothing: its claims count as deaths."""

RELEASE_CLAIMS = sa.text("""
    DELETE FROM claims USING unnest(CAST(:topics AS text[]), CAST(:partitions AS int[])) AS c (topic, partition)
    WHERE worker_epoch = :epoch AND claims.topic = c.topic AND claims.partition = c.partition
""")

RELEASE_ALL_CLAIMS = sa.text("DELETE FROM claims WHERE worker_epoch = :epoch")

OPEN_CLAIMS = sa.text("""
    SELECT first_offset, last_offset FROM claims
    WHERE topic = :topic AND partition = :partition AND worker_epoch <> :epoch ORDER BY worker_epoch
""")
"""A worker that gives a partition back in order releases its claim: what is still open was left by a death."""

WRITE_SUSPECTS = sa.text("""
    WITH survivors AS (UPDATE suspects SET worker_epoch = NULL WHERE key = ANY (CAST(:survivors AS uuid[])))
    INSERT INTO suspects AS s (key, deaths, worker_epoch)
    SELECT g.key, g.deaths, :epoch
    FROM unnest(CAST(:keys AS uuid[]), CAST(:deaths AS int[])) AS g (key, deaths) ORDER BY g.key
    ON CONFLICT (key) DO UPDATE
    SET deaths = greatest(s.deaths, excluded.deaths), worker_epoch = excluded.worker_epoch, noted_at = now()
""")

CLEAR_SUSPECTS = sa.text("DELETE FROM suspects WHERE key = ANY (CAST(:keys AS uuid[]))")

# -- settlement -----------------------------------------------------------------------------------

LOCK_OPEN_WORKERS = sa.text("""
    SELECT epoch FROM workers WHERE epoch = ANY (CAST(:epochs AS bigint[])) AND closed_at IS NULL
    ORDER BY epoch FOR KEY SHARE
""")
"""Holds off whoever would close these epochs (FOR UPDATE) until we commit, and no heartbeat."""

SETTLE = sa.text(f"""
    INSERT INTO settled AS s (key, generation, outcome, reason, day, records, winner_epoch, winner_seq)
    SELECT g.key, 1, g.outcome, g.reason, g.day, ARRAY[g.record], g.epoch, g.seq
    FROM unnest(CAST(:keys AS uuid[]), CAST(:outcomes AS text[]), CAST(:reasons AS text[]), CAST(:days AS date[]),
                CAST(:records AS text[]), CAST(:epochs AS bigint[]), CAST(:seqs AS bigint[]))
         AS g (key, outcome, reason, day, record, epoch, seq)
    ORDER BY g.key
    ON CONFLICT (key) DO UPDATE
    SET generation = s.generation + 1, outcome = excluded.outcome, reason = excluded.reason, day = excluded.day,
        records = s.records || excluded.records, winner_epoch = excluded.winner_epoch,
        winner_seq = excluded.winner_seq, settled_at = now()
    WHERE s.outcome NOT IN ({_ANSWERS}) AND NOT s.records @> excluded.records
    RETURNING key::text, generation
""")
"""The winners. A new key wins; so does a new record of a key that was refused (a resubmission). Keys are
unique within one call and inserted in order, so that writers of the same keys queue and do not deadlock."""

ANSWERED = sa.text(f"SELECT key::text FROM settled WHERE key = ANY (CAST(:keys AS uuid[])) AND outcome IN ({_ANSWERS})")
"""Which of these keys nobody can win any more."""

_VISIBLE = """
    FROM settled s JOIN results r ON r.day = s.day AND r.key = s.key AND r.generation = s.generation
    WHERE s.key = ANY (CAST(:keys AS uuid[]))
"""
# json and jsonb as text: an answer goes out as the bytes it came in.
_ROW = ", ".join(
    f"r.{column.name}::text" if column.name in ("key", "output", "tags") else f"r.{column.name}"
    for column in results.columns
)

VISIBLE_RESULTS = sa.text(f"SELECT {_ROW} {_VISIBLE}")

STORED = sa.text("""
    SELECT key::text, generation, day, records[cardinality(records)] AS record, winner_epoch, winner_seq
    FROM settled WHERE key = ANY (CAST(:keys AS uuid[]))
""")
"""Who won the keys that we lost: perhaps ourselves, in a commit whose reply was lost."""

REMEMBER_AGAIN = sa.text("""
    INSERT INTO settled (key, generation, outcome, reason, day, records, winner_epoch)
    SELECT DISTINCT ON (key) key, generation, status, error_code, day,
           ARRAY[topic || '/' || partition || '/' || record_offset], worker_epoch
    FROM results WHERE day = :day AND key = CAST(:key AS uuid) ORDER BY key, generation DESC
    ON CONFLICT DO NOTHING
""")
"""A record came again after its key was forgotten, but its result is still there."""

RESULT_COLUMNS = tuple(column.name for column in results.columns)
ATTEMPT_COLUMNS = tuple(column.name for column in attempts.columns)
COPY_RESULTS = f"COPY results ({', '.join(RESULT_COLUMNS)}) FROM STDIN".encode()
COPY_ATTEMPTS = f"COPY attempts ({', '.join(ATTEMPT_COLUMNS)}) FROM STDIN".encode()

ADD_ATTEMPTS = pg.insert(attempts).on_conflict_do_nothing(index_elements=["day", "worker_epoch", "seq"])
"""For attempts that may be there already: those of a loser, of nobody, of a repeated heartbeat."""

# -- looking at results ---------------------------------------------------------------------------

PARTITION_DAYS = sa.text("""
    SELECT (regexp_match(c.relname, '(\\d{4}_\\d{2}_\\d{2})$'))[1]
    FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = CAST('results' AS regclass)
""")

FIND_RESULTS = sa.text(f"""
    SELECT {_ROW} FROM results r
    WHERE (r.id = :id OR (r.key = ANY (CAST(:keys AS uuid[])) AND r.day = ANY (CAST(:days AS date[]))))
      AND (CAST(:source AS text) IS NULL OR r.source = :source)
    ORDER BY r.appended_ms DESC, r.generation DESC
""")
"""By id or key. The days of all partitions let each use its primary key, which begins with the day."""

ATTEMPTS_OF = sa.text("""
    SELECT worker_epoch, seq, number, waste, allocated_ns, charge_usd, tariff_id, prompt_tokens, cached_tokens,
           output_tokens, to_timestamp(started_ms / 1000.0) AS started_at, to_timestamp(ended_ms / 1000.0) AS ended_at
    FROM attempts WHERE key = CAST(:key AS uuid) AND generation = :generation AND result_day = :day AND day >= :day
    ORDER BY started_ms, worker_epoch, seq
""")
"""Reads the partitions from the result's day on: for a person, not for a loop."""

# -- prices ---------------------------------------------------------------------------------------

TARIFF_AT = sa.text("""
    SELECT tariff_id, input_usd, cached_input_usd, output_usd FROM tariffs
    WHERE valid_from <= to_timestamp(:at_ms / 1000.0) AND (model IS NULL OR model = CAST(:model AS text))
    ORDER BY model NULLS LAST, valid_from DESC LIMIT 1
""")
"""A model's own rows come before those for every model."""

ADD_TARIFF = sa.text("""
    INSERT INTO tariffs (model, valid_from, input_usd, cached_input_usd, output_usd)
    VALUES (:model, :valid_from, :input_usd, :cached_input_usd, :output_usd)
    ON CONFLICT (model, valid_from) DO NOTHING
""")

SAME_TARIFF = sa.text("""
    SELECT tariff_id FROM tariffs
    WHERE model IS NOT DISTINCT FROM CAST(:model AS text) AND valid_from = :valid_from AND input_usd = :input_usd
      AND cached_input_usd = :cached_input_usd AND output_usd = :output_usd
""")
"""The row just added, or an equal one; none: another price holds from that moment."""

ADD_GPU_PRICE = sa.text("""
    INSERT INTO gpu_prices (gpu_kind, valid_from, usd_per_hour) VALUES (:gpu_kind, :valid_from, :usd_per_hour)
    ON CONFLICT (gpu_kind, valid_from) DO NOTHING
""")

SAME_GPU_PRICE = sa.text("""
    SELECT 1 FROM gpu_prices
    WHERE gpu_kind = :gpu_kind AND valid_from = :valid_from AND usd_per_hour = :usd_per_hour
""")

SEED_GPU_PRICE = sa.text("""
    INSERT INTO gpu_prices (gpu_kind, valid_from, usd_per_hour)
    SELECT :gpu_kind, :valid_from, :usd_per_hour
    WHERE NOT EXISTS (SELECT 1 FROM gpu_prices WHERE gpu_kind = :gpu_kind) ON CONFLICT DO NOTHING
""")

SEED_TARIFF = sa.text("""
    INSERT INTO tariffs (valid_from, input_usd, cached_input_usd, output_usd)
    SELECT :valid_from, :input_usd, :cached_input_usd, :output_usd
    WHERE NOT EXISTS (SELECT 1 FROM tariffs WHERE model IS NULL) ON CONFLICT DO NOTHING
""")

LIST_TARIFFS = sa.text("SELECT * FROM tariffs ORDER BY model NULLS FIRST, valid_from")
LIST_GPU_PRICES = sa.text("SELECT * FROM gpu_prices ORDER BY gpu_kind, valid_from")
