"""Ids of tasks: computed from type and idempotency key if there is a key, otherwise new for each task.

Every way of submitting computes the same id from the same key; the SQL function is `ingest_task_id`.
"""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from typing import Final

SEPARATOR: Final = "\x1f"
_VERSION_7: Final = 7 << 76
_VERSION_8: Final = 8 << 76
_VARIANT: Final = 0b10 << 62
_FREE: Final = ~(0b1111 << 76 | 0b11 << 62)  # the bits that are neither version nor variant


def keyed_id(type: str, key: str) -> uuid.UUID:
    """Return a UUIDv8 made of the SHA-256 of type and idempotency key."""
    digest = hashlib.sha256(f"{type}{SEPARATOR}{key}".encode()).digest()
    return uuid.UUID(int=int.from_bytes(digest[:16], "big") & _FREE | _VERSION_8 | _VARIANT)


def fresh_id() -> uuid.UUID:
    """Return a UUIDv7, so that new tasks are neighbours in the index. Nothing is decided by the time in it."""
    milliseconds, rest = divmod(time.time_ns(), 1_000_000)
    fraction = rest * 4096 // 1_000_000  # of the millisecond, in 12 bits
    chance = int.from_bytes(os.urandom(8), "big") >> 2
    return uuid.UUID(int=milliseconds << 80 | _VERSION_7 | fraction << 64 | _VARIANT | chance)
