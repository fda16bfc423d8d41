"""Consume Redis Streams so that the effect of each entry happens once (`consume.py`).

A consumer is registered in code (`consumers.py`). The Celery task `receipts.consume` runs it.
"""
