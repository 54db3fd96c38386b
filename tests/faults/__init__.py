"""Faults on purpose: each breaks something real under load, several times, and counts what became of the requests.

``row`` (what is counted) → ``site`` (the broker and database that may be broken, and the load) → ``workers``,
``engines``, ``endpoints``, ``membership``, ``outages``, ``records``, ``clocks`` (the faults) → ``catalogue``
(all of them) → ``__main__`` (``make faults``). ``test_faults.py`` runs a round or two of each.
"""
