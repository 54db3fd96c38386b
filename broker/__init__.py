"""Thin Kafka plumbing: client configuration, topics, producing with acknowledgement.

Reading order: ``config`` (properties of every client), ``kafka_python`` (the same in that library's words),
``records`` (sizes; pure), ``topics`` (create and check), ``publisher``.

Must not know: requests, engines, databases.
"""
