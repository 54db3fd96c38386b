"""Thin Kafka plumbing: client configuration, topics, producing with acknowledgement.

Reading order: ``config`` (properties of every client), ``topics`` (create and check), ``publisher``.

Must not know: requests, engines, databases.
"""
