"""The cases of the conformance suite, as fixtures."""

from __future__ import annotations

from tests.outbox.publishers.redis_cases import celery, redis_stream

__all__ = ["celery", "redis_stream"]
