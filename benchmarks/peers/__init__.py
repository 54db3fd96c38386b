"""What headrace is measured against: whole programs, as one would write them for speed, each on its own.

``bare`` needs what a headrace worker needs; the others run in the peers' environment. Each is given one JSON object:
``bootstrap_servers``, ``topic``, ``group``, ``postgres`` (URL), ``results`` (topic; ``bare`` only) and ``copy`` (how
rows are written; not ``bare``).
"""
