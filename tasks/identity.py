"""Who a task is (P10): with a key, an id made of type and key, the same on every lane; without one, an id of its own.

The SQL function `ingest_task_id` in `models/submit_function.py` makes the same id of the same key.
"""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from typing import Final

SEPARATOR: Final = "\x1f"
_VERSION_8: Final = 8
_VERSION_7: Final = 7


def keyed_id(type: str, key: str) -> uuid.UUID:
    """UUIDv8 of SHA-256(type, key)."""
    return _uuid(hashlib.sha256(f"{type}{SEPARATOR}{key}".encode()).digest()[:16], _VERSION_8)


def fresh_id() -> uuid.UUID:
    """UUIDv7: neighbours in time are neighbours in the index. Nothing sorts or expires by it (P9)."""
    milliseconds, rest = divmod(time.time_ns(), 1_000_000)
    fraction = rest * 4096 // 1_000_000  # of the millisecond, in the 12 bits that follow it
    return _uuid(milliseconds.to_bytes(6, "big") + fraction.to_bytes(2, "big") + os.urandom(8), _VERSION_7)


def _uuid(raw: bytes, version: int) -> uuid.UUID:
    number = int.from_bytes(raw, "big")
    number = number & ~(0xF << 76) | version << 76
    number = number & ~(0x3 << 62) | 0x2 << 62
    return uuid.UUID(int=number)
