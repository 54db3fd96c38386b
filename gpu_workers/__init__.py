"""Answers requests: engines, warm-up, credits, timeouts, metering, and the worker process.

Reading order: ``engine`` (the page of promises), ``engines/`` (the implementations and the one factory),
``credits`` (who may enter the engine next; pure), ``metering`` (who pays for which ns; pure), ``timeouts`` (pure),
``preparation`` (requests made ready), ``entrance`` (who waits, and who is next), ``flights`` (what is in the engine),
``judge`` (what becomes of a request), ``dispatcher`` (the engine loop, which drives these), ``worker`` (the process).

Must not know: how records are read or settled beyond ``consumers``' interfaces; HTTP gateways.
"""
