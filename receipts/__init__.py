"""Streams that the ledger follows: consumers of Redis Streams whose effects happen once (`streams.py`).

A consumer is registered in code (`consumers.py`). It runs as the Celery task `receipts.consume` on the queue
`receipts`, which has a worker of its own: `celery -A tasks worker -n receipts@%h -Q receipts`.
"""
