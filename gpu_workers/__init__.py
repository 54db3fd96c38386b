"""Answers requests: engines, warm-up, credits, timeouts, metering, and the worker process.

Reading order: ``engine`` (the page of promises), ``engines/`` (the implementations and the one
factory), ``credits`` (who may enter the engine next; pure), ``metering`` (who pays for which ns;
pure), ``timeouts`` (pure), ``dispatcher`` (the engine loop), ``worker`` (the process).

Must not know: how records are read or settled beyond ``consumers``' interfaces; HTTP gateways.
"""
