"""What fields must hold together."""

from __future__ import annotations

import re

from contract import routing
from contract.errors import SettingsError
from contract.settings.sections import Engine, Settings


def check_rules(settings: Settings) -> None:
    """Raises ``SettingsError`` for the first rule that is broken."""
    _check_endpoint(settings.engine)
    slots = settings.engine.slots
    reserved = sum(cls.reserved_slots for cls in settings.worker_classes.values()) if _classes_known(settings) else 0
    if reserved >= slots:
        field = "engine.max_requests" if slots == settings.engine.max_requests else "engine.http_connections"
        raise SettingsError(field, slots, f"must exceed the classes' reserved_slots, {reserved} in all")
    if settings.topics.min_insync_replicas > settings.topics.replication:
        raise SettingsError(
            "topics.min_insync_replicas",
            settings.topics.min_insync_replicas,
            f"must be at most topics.replication = {settings.topics.replication}",
        )
    for kind, names in (("class", settings.classes), ("bucket", settings.buckets.edges), ("pool", settings.pools)):
        if not names:
            raise SettingsError(kind, {}, "at least one is needed")
        for name in names:
            if not routing.is_word(name):
                raise SettingsError(f"name of a {kind}", name, "use a-z, 0-9, - and _, up to 63 characters")
    edges = list(settings.buckets.edges.values())
    if edges != sorted(set(edges)):
        raise SettingsError("buckets.edges", settings.buckets.edges, "edges must rise from short to long")
    for field, name in (("worker.pool", settings.worker.pool), ("client.pool", settings.client.pool)):
        if name not in settings.pools:
            raise SettingsError(field, name, f"is not one of [pools]: {', '.join(settings.pools)}")
    if settings.client.class_name not in settings.classes:
        raise SettingsError(
            "client.class_name", settings.client.class_name, f"is not one of [classes]: {', '.join(settings.classes)}"
        )
    if settings.worker.dead_after_s * 1000 <= settings.kafka.session_timeout_ms:
        raise SettingsError(
            "worker.dead_after_s",
            settings.worker.dead_after_s,
            f"must exceed kafka.session_timeout_ms = {settings.kafka.session_timeout_ms}",
        )
    if settings.postgres.results_days < settings.postgres.key_horizon_days:
        raise SettingsError(
            "postgres.results_days",
            settings.postgres.results_days,
            f"must be at least postgres.key_horizon_days = {settings.postgres.key_horizon_days}, "
            "else a duplicate could not be answered from the store",
        )
    if settings.postgres.key_horizon_days * 24 <= settings.topics.retention_hours:
        raise SettingsError(
            "postgres.key_horizon_days",
            settings.postgres.key_horizon_days,
            f"must be longer than topics.retention_hours = {settings.topics.retention_hours}, "
            "else a late duplicate would be computed again",
        )


def _check_endpoint(engine: Engine) -> None:
    if engine.kind != "http":
        return
    if not re.match(r"https?://[^/?#\s@]+(/[^?#\s]*)?$", engine.http_url):
        raise SettingsError(
            "engine.http_url",
            engine.http_url,
            'must be a URL such as "http://127.0.0.1:8000/v1" (engine.kind is "http")',
        )


def _classes_known(settings: Settings) -> bool:
    for name in settings.worker.classes:
        if name not in settings.classes:
            raise SettingsError("worker.classes", name, f"is not one of [classes]: {', '.join(settings.classes)}")
    return True
