"""One way to write a payload as text, so that equal payloads have equal hashes, in every process and for ever (P10)."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

from models.errors import Misuse

MAX_BYTES: Final = 1_048_576


class BadPayload(Misuse):
    """The payload cannot be stored."""

    code = "bad_payload"


def canonical_json(value: Any) -> str:
    """Sorted keys, no spaces. Refused: what is not JSON, NaN, NUL, half a surrogate pair, more than 1 MiB."""
    try:
        written = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        size = len(written.encode())
    except UnicodeEncodeError:
        raise BadPayload("The payload has half of a surrogate pair, which is no text.") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise BadPayload(f"The payload is not JSON: {error}.") from None
    if size > MAX_BYTES:
        raise BadPayload(f"The payload has {size:,} bytes, and {MAX_BYTES:,} is the most.")
    if "\\u0000" in written and "\x00" in _all_text(value):
        raise BadPayload("The payload has a NUL character, which PostgreSQL does not store.")
    return written


def payload_sha(written: str) -> str:
    """SHA-256 of canonical JSON, in hexadecimal."""
    return hashlib.sha256(written.encode()).hexdigest()


def _all_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return "".join(_all_text(part) for pair in value.items() for part in pair)
    if isinstance(value, list | tuple):
        return "".join(map(_all_text, value))
    return ""
