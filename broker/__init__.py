"""Thin Kafka plumbing: client configuration, topics, producing with acknowledgement, reading what stands there.

Reading order: ``config`` (properties of every client), ``kafka_python`` (the same in that library's words),
``records`` (what is read; sizes; pure), ``topics`` (create and check), ``publisher``, ``reader``.

Must not know: requests, engines, databases.
"""
