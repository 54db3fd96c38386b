"""The one-machine stack: a real broker, a real Postgres and child processes, without Docker.

Reading order: ``processes`` (a child, its log, and the guard that ends it with us), ``kafka``,
``postgres``, ``machine`` (all of it together, or the ones already running), ``model`` (the tiny model).

Must not know: what flows through.
"""
