"""What every room agrees on: words, shapes and numbers. No I/O beyond reading one settings file.

Reading order: ``statuses`` (how a request can end), ``errors`` (the three branches that decide
everything), ``messages`` (request and result as they stand on the wire), ``identity`` (keys),
``routing`` (topics, buckets, headers), ``settings``, ``money`` (tariffs), ``metrics`` (the
catalogue), ``logs``.

Must not know: Kafka clients, databases, engines, threads.
"""
