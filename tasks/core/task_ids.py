"""Who a task is (P10): with a key, an id made of type and key, the same on every lane; without one, an id of its own.

The SQL function `ingest_task_id` makes the same id of the same key.
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
_FREE: Final = ~(0b1111 << 76 | 0b11 << 62)  # every other bit


def keyed_id(type: str, key: str) -> uuid.UUID:
    """UUIDv8 of SHA-256(type, key)."""
    digest = hashlib.sha256(f"{type}{SEPARATOR}{key}".encode()).digest()
    return uuid.UUID(int=int.from_bytes(digest[:16], "big") & _FREE | _VERSION_8 | _VARIANT)


def fresh_id() -> uuid.UUID:
    """UUIDv7: neighbours in time are neighbours in the index. Nothing sorts or expires by it (P9)."""
    milliseconds, rest = divmod(time.time_ns(), 1_000_000)
    fraction = rest * 4096 // 1_000_000  # of the millisecond, in the 12 bits that follow it
    chance = int.from_bytes(os.urandom(8), "big") >> 2
    return uuid.UUID(int=milliseconds << 80 | _VERSION_7 | fraction << 64 | _VARIANT | chance)
