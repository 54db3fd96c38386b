"""Postgres: tables, migrations, statements, the ledger of time and money, retention.

Reading order: ``rows`` (what goes in and out), ``tables`` and ``migrations/``, ``store`` (the only class
that writes), ``settling`` (who answers a key), ``statements`` (every one has a name), ``mapping`` (rows to
columns; pure), ``partitions`` (days), ``database`` (deadlines and retries), then the readers: ``reports``,
``cost`` (both bases, down to the bill), ``reconcile`` (law 6 in SQL), ``query`` (a person's own statement).

Must not know: Kafka, engines, what a window is.
"""
