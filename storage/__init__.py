"""Postgres: tables, migrations, statements, the ledger of time and money, retention.

Reading order: ``rows`` (what goes in and out), ``tables``, ``migrations/``, ``partitions``,
``store`` (the only class that talks to the database; every statement has a name), ``cost`` and
``reconcile`` (law 6 in SQL).

Must not know: Kafka, engines, what a window is.
"""
