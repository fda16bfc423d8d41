"""A client of the receipt log for code that may block: savers, commands, checks and scrapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import redis

import settings
from receipts.errors import ReceiptLogUnreachable


def connect(*, answer_seconds: float = 5.0) -> Any:
    """Return a client, which the caller closes. It never repeats a command by itself."""
    return redis.Redis.from_url(
        settings.current().redis_url,
        decode_responses=True,
        encoding_errors="surrogateescape",
        socket_timeout=answer_seconds,
        socket_connect_timeout=answer_seconds,
        retry=None,
    )


@contextmanager
def connected(*, answer_seconds: float = 5.0) -> Iterator[Any]:
    """Yield a client, and raise ReceiptLogUnreachable for what Redis raises in the block."""
    with closing(connect(answer_seconds=answer_seconds)) as client, translated():
        yield client


@contextmanager
def translated() -> Iterator[None]:
    """Raise ReceiptLogUnreachable for what Redis raises in the block."""
    try:
        yield
    except redis.RedisError as error:
        place, reason = settings.place(settings.current().redis_url), str(error).rstrip(".")
        raise ReceiptLogUnreachable(f"The receipt log at {place} is unreachable: {reason}.") from None
