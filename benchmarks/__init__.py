"""Speed, measured against peers in the same run: figures that anyone can repeat with ``make bench``.

``figure`` (what is written down of a benchmark) → ``site`` (broker, database, fresh topics and tables) → ``load``
(requests, published beforehand) → one module per group of benchmarks → ``catalogue`` (all of them) → ``__main__``.
``peers/`` are programs of others' libraries, run by a Python of their own.
"""
