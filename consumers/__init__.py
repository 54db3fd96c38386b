"""Takes requests off Kafka and settles them.

Reading order: ``item`` (a request in this worker's hands), ``window`` and ``offsets`` (pure), ``identity``
(duplicate or resubmission; pure), ``intake`` (the thread that owns a consumer), ``admission`` (from
records to items), ``dead_letters``, ``outcome_queue``, ``settlement`` (commit), ``publishing`` (publish, then the
offset).

Must not know: engines, credits, GPUs.
"""
