"""Law 6 in SQL: every identity of the ledger is a named statement that returns what breaks it.

Nothing is returned on a sound database, also while workers run: all statements see one snapshot, and what a
settlement writes, it writes whole. An open epoch may have settled attempts whose busy time its next
heartbeat will tell, so for open epochs that one identity is an inequality.

Days that retention may have touched are left out: results and attempts older than ``results_days``, keys
older than ``key_horizon_days``.
"""

from __future__ import annotations

import dataclasses
import datetime as dt

import sqlalchemy as sa

from storage import partitions
from storage.store import Store

MOST_PER_CHECK = 20
"""Findings told of one check; the rest would say the same."""
_CLOCK_SKEW_MS = 1_000


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One place where the ledger does not add up."""

    check: str
    """Name of the identity."""
    subject: str
    """Whose: a worker epoch, a key, a business line."""
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.check}: {self.subject}: expected {self.expected}, found {self.found}"


def reconcile(store: Store) -> list[Finding]:
    """Everything that does not add up; empty on a sound database. Reap dead workers first."""
    settings, today = store.postgres, partitions.today(store.database)
    parameters = {
        "kept_from": today - dt.timedelta(days=settings.results_days),
        "remembered_from": today - dt.timedelta(days=settings.key_horizon_days),
        "skew_ms": _CLOCK_SKEW_MS,
        "most": MOST_PER_CHECK,
    }

    def work(connection: sa.Connection) -> list[Finding]:
        return [
            Finding(name, str(row.subject), str(row.expected), str(row.found))
            for name, statement in CHECKS.items()
            for row in connection.execute(sa.text(f"{statement} LIMIT :most"), parameters)
        ]

    return store.database.run(work, read_only=True)


_TOLD = """
    SELECT w.*, coalesce(t.rows, 0) AS rows, coalesce(t.told_ns, 0) AS told_ns, coalesce(t.busy_ns, 0) AS busy_ns,
           coalesce(t.rounding_ns, 0) AS rounding_ns, coalesce(t.last_ms, w.started_ms) AS last_ms
    FROM workers w LEFT JOIN (
        SELECT worker_epoch, count(*) AS rows, sum(busy_ns) AS busy_ns, sum(rounding_ns) AS rounding_ns,
               sum(starting_ns + idle_ns + busy_ns + draining_ns + stalled_ns) AS told_ns, max(at_ms) AS last_ms
        FROM worker_time GROUP BY worker_epoch
    ) t ON t.worker_epoch = w.epoch
"""
_UNWASTED = """
    SELECT result_day, key, generation, count(*) AS n FROM attempts
    WHERE waste IS NULL AND result_day >= :kept_from GROUP BY result_day, key, generation
"""
_ENGINE_TOKENS = "r.status = 'ok' OR (r.status = 'degraded' AND r.prompt_tokens + r.output_tokens > 0)"

CHECKS = {
    # Provisioned time, measured by itself, is the sum of the states and of what was lost.
    "provisioned_is_all_states": f"""
        SELECT 'worker epoch ' || epoch AS subject, provisioned_ns || ' ns' AS expected,
               (told_ns + lost_ns) || ' ns in states and lost' AS found
        FROM ({_TOLD}) w WHERE provisioned_ns <> told_ns + lost_ns ORDER BY epoch
    """,
    # No row of a worker's time is missing: they are numbered from 1.
    "time_rows_are_gapless": """
        SELECT 'worker epoch ' || worker_epoch AS subject, 'rows 1 to ' || max(seq) AS expected,
               count(*) || ' rows from ' || min(seq) AS found
        FROM worker_time GROUP BY worker_epoch HAVING min(seq) <> 1 OR max(seq) <> count(*) ORDER BY worker_epoch
    """,
    # Busy time is shared out to the last ns. Open epochs: never more than there was, up to now.
    "busy_is_shared_out": f"""
        SELECT 'worker epoch ' || w.epoch AS subject, w.busy_ns || ' ns busy' AS expected,
               (w.rounding_ns + coalesce(a.allocated_ns, 0)) || ' ns allocated and rounding' AS found
        FROM ({_TOLD}) w LEFT JOIN (
            SELECT worker_epoch, sum(allocated_ns) AS allocated_ns FROM attempts GROUP BY worker_epoch
        ) a ON a.worker_epoch = w.epoch
        WHERE (to_timestamp(w.started_ms / 1000.0) AT TIME ZONE 'UTC')::date >= :kept_from AND CASE
            WHEN w.closed_at IS NOT NULL THEN w.rounding_ns + coalesce(a.allocated_ns, 0) <> w.busy_ns
            ELSE w.rounding_ns + coalesce(a.allocated_ns, 0) > w.busy_ns
                 + 1000000 * (greatest(extract(epoch FROM now()) * 1000 - w.last_ms, 0) + :skew_ms)
        END ORDER BY w.epoch
    """,
    # What is remembered has its visible result, with the same outcome.
    "settled_key_has_its_result": """
        SELECT 'key ' || s.key AS subject, coalesce(r.status, 'no result') AS found,
               s.outcome || ' in generation ' || s.generation || ' on ' || s.day AS expected
        FROM settled s LEFT JOIN results r ON r.day = s.day AND r.key = s.key AND r.generation = s.generation
        WHERE s.day >= :kept_from AND s.outcome IS DISTINCT FROM r.status ORDER BY s.key
    """,
    # What has a result is remembered, and one result alone is the visible one.
    "result_has_its_settled_key": """
        SELECT 'key ' || r.key AS subject, coalesce('generation ' || s.generation || ' on ' || s.day, 'no result')
               AS expected, 'generation ' || r.generation || ' on ' || r.day AS found
        FROM results r LEFT JOIN settled s ON s.key = r.key
        WHERE r.day >= :remembered_from
          AND (s.key IS NULL OR r.generation > s.generation OR (r.generation = s.generation AND r.day <> s.day))
        ORDER BY r.key
    """,
    # One attempt answered, no more; whatever ended otherwise has at most one that is not waste.
    "one_attempt_answers": f"""
        SELECT 'key ' || r.key || ' generation ' || r.generation AS subject,
               CASE WHEN {_ENGINE_TOKENS} THEN '1' ELSE 'at most 1' END || ' attempt' AS expected,
               coalesce(a.n, 0) || ' attempts that are no waste' AS found
        FROM results r LEFT JOIN ({_UNWASTED}) a
             ON a.result_day = r.day AND a.key = r.key AND a.generation = r.generation
        WHERE r.day >= :kept_from AND (coalesce(a.n, 0) > 1 OR (coalesce(a.n, 0) = 0 AND ({_ENGINE_TOKENS})))
        ORDER BY r.key
    """,
    # An attempt for a request says whose: its result exists and agrees on everything copied from it.
    "attempt_agrees_with_its_result": """
        SELECT 'attempt ' || a.worker_epoch || '/' || a.seq AS subject,
               coalesce(row(r.business_line, r.source, r.type, r.model, r.class, r.bucket, r.pool)::text, 'no attempt')
               AS expected,
               row(a.business_line, a.source, a.type, a.model, a.class, a.bucket, a.pool)::text AS found
        FROM attempts a
        LEFT JOIN results r ON r.day = a.result_day AND r.key = a.key AND r.generation = a.generation
        WHERE a.result_day >= :kept_from AND (r.key IS NULL OR (a.waste IS NULL
          AND (a.business_line, a.source, a.type, a.model, a.class, a.bucket, a.pool)
              IS DISTINCT FROM (r.business_line, r.source, r.type, r.model, r.class, r.bucket, r.pool)))
        ORDER BY a.worker_epoch, a.seq
    """,
    # The answer's tokens are those of the attempt that gave it.
    "tokens_are_the_attempts": """
        SELECT 'key ' || r.key || ' generation ' || r.generation AS subject,
               row(a.prompt_tokens, a.cached_tokens, a.output_tokens)::text AS expected,
               row(r.prompt_tokens, r.cached_tokens, r.output_tokens)::text AS found
        FROM results r JOIN attempts a ON a.result_day = r.day AND a.key = r.key AND a.generation = r.generation
        WHERE r.day >= :kept_from AND a.result_day >= :kept_from AND a.waste IS NULL
          AND (a.prompt_tokens, a.cached_tokens, a.output_tokens)
              <> (r.prompt_tokens, r.cached_tokens, r.output_tokens)
        ORDER BY r.key
    """,
    # Nobody pays for waste.
    "waste_is_free": """
        SELECT 'attempt ' || worker_epoch || '/' || seq AS subject, '0 for ' || waste AS expected,
               charge_usd::text AS found
        FROM attempts WHERE waste IS NOT NULL AND charge_usd <> 0 ORDER BY worker_epoch, seq
    """,
    # A charge is tokens × tariff, recomputed here. Multiplied by a millionth: division would round.
    "charge_is_tariff_times_tokens": """
        SELECT subject, expected::text, found::text FROM (
            SELECT 'attempt ' || a.worker_epoch || '/' || a.seq AS subject, a.charge_usd AS found,
                   CASE WHEN a.tariff_id IS NULL THEN 0 ELSE 0.000001 * (
                       t.input_usd * (a.prompt_tokens - a.cached_tokens)
                       + t.cached_input_usd * a.cached_tokens + t.output_usd * a.output_tokens) END AS expected
            FROM attempts a LEFT JOIN tariffs t ON t.tariff_id = a.tariff_id WHERE a.waste IS NULL
        ) charged WHERE found IS DISTINCT FROM expected ORDER BY subject
    """,
    # A request is charged what its attempts were, once.
    "result_is_charged_its_attempts": """
        SELECT 'key ' || r.key || ' generation ' || r.generation AS subject,
               coalesce(a.charge_usd, 0)::text AS expected, r.charge_usd::text AS found
        FROM results r LEFT JOIN (
            SELECT result_day, key, generation, sum(charge_usd) AS charge_usd FROM attempts
            WHERE result_day >= :kept_from GROUP BY result_day, key, generation
        ) a ON a.result_day = r.day AND a.key = r.key AND a.generation = r.generation
        WHERE r.day >= :kept_from AND r.charge_usd <> coalesce(a.charge_usd, 0) ORDER BY r.key
    """,
    # A business line pays the same by requests and by attempts.
    "business_line_totals_agree": """
        SELECT 'business line ' || quote_nullable(line) AS subject, sum(by_result)::text AS expected,
               sum(by_attempt)::text AS found
        FROM (SELECT business_line AS line, charge_usd AS by_result, 0 AS by_attempt
              FROM results WHERE day >= :kept_from
              UNION ALL SELECT business_line, 0, charge_usd FROM attempts WHERE result_day >= :kept_from) charged
        GROUP BY line HAVING sum(by_result) <> sum(by_attempt) ORDER BY line
    """,
    # Engine time and its worker belong together, else it would stand in no report.
    "time_has_its_worker": """
        SELECT 'worker epoch ' || worker_epoch AS subject, 'a worker' AS expected, 'none, but ' || source AS found
        FROM (SELECT worker_epoch, 'time rows' AS source FROM worker_time
              UNION SELECT worker_epoch, 'attempts' FROM attempts) used
        WHERE NOT EXISTS (SELECT 1 FROM workers w WHERE w.epoch = used.worker_epoch) ORDER BY worker_epoch
    """,
    # Nothing was ever taken back.
    "nothing_is_negative": """
        SELECT * FROM (
            SELECT 'attempt ' || worker_epoch || '/' || seq AS subject, 'at least 0' AS expected,
                   allocated_ns || ' ns, ' || charge_usd || ' USD' AS found
            FROM attempts WHERE allocated_ns < 0 OR charge_usd < 0
            UNION ALL
            SELECT 'worker epoch ' || worker_epoch || ' row ' || seq, 'at least 0', 'a negative time'
            FROM worker_time WHERE least(starting_ns, idle_ns, busy_ns, draining_ns, stalled_ns, rounding_ns) < 0
        ) negative ORDER BY subject
    """,
}
