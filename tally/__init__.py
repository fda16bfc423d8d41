"""The tally: what became of tasks and events, counted in the ledger, so that it survives restarts and is counted once.

Settling tasks appends a row of `task_tally` in the same statement (`append.py`). What settles nothing, such as
a delivery that is skipped, is added up in each process and appended about once a second (`counts.py`). A tick folds the
rows into sums per minute, hour and day, and since the installation exists (`fold.py`). `totals.py` reads them.
"""
