"""``headrace demo``: everything on one machine, a mixed load, and a report that adds up.

Reading order: ``load`` (what is asked; pure), ``tally`` (what came back; pure), ``setup`` (settings and
the worker process), ``traffic`` (publishing and reading), ``screen`` (what is shown while it runs),
``verdict`` (lost, doubled, unreconciled), ``report`` (the tables), ``run`` (all of it in order).
"""
