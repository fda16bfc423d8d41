"""Sinks: where effects of tasks go outside the ledger's transaction, each with a written guarantee.

    task.sink("billing").run(charge, payment)

`contract.py` explains the guarantees; docs/exactly-once.md is the page for users.
"""
