"""One way to write a payload as text, so that equal payloads have equal hashes, in every process and for ever (P10).

What cannot be stored is refused here, before anything is: each reason has its own code.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

from models.errors import Misuse

MAX_BYTES: Final = 1_048_576
MAX_DEPTH: Final = 64
MAX_KEYS: Final = 10_000


class BadPayload(Misuse):
    """The payload cannot be stored."""

    code = "payload_not_json"


class PayloadTooLarge(BadPayload):
    """The payload is too large."""

    code = "payload_too_large"
    http_status = 413


class PayloadTooDeep(BadPayload):
    """The payload is nested too deeply."""

    code = "payload_too_deep"


class TooManyKeys(BadPayload):
    """The payload has too many keys."""

    code = "payload_too_many_keys"


class PayloadHasNul(BadPayload):
    """The payload has a NUL character, which PostgreSQL does not store."""

    code = "payload_has_nul"


def canonical_json(value: Any, *, what: str = "payload") -> str:
    """Sorted keys, no spaces. Refused: what is not JSON, NaN, NUL, half a surrogate pair, and what is too much."""
    try:
        written = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        size = len(written.encode())
    except UnicodeEncodeError:
        raise BadPayload(f"The {what} has half of a surrogate pair, which is no text.") from None
    except RecursionError:
        raise PayloadTooDeep(f"The {what} is nested more than {MAX_DEPTH} levels deep.") from None
    except (TypeError, ValueError) as error:
        raise BadPayload(f"The {what} is not JSON: {error}.") from None
    if size > MAX_BYTES:
        raise PayloadTooLarge(f"The {what} has {size:,} bytes, and {MAX_BYTES:,} is the most.")
    _check_shape(value, written, what)
    return written


def payload_sha(written: str) -> str:
    """SHA-256 of canonical JSON, in hexadecimal."""
    return hashlib.sha256(written.encode()).hexdigest()


def _check_shape(value: Any, written: str, what: str) -> None:
    """Walks only through what could be wrong: few brackets cannot be deep, few colons are few keys."""
    if written.count(":") > MAX_KEYS and _count_keys(value) > MAX_KEYS:
        raise TooManyKeys(f"The {what} has more than {MAX_KEYS:,} keys.")
    if written.count("{") + written.count("[") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise PayloadTooDeep(f"The {what} is nested more than {MAX_DEPTH} levels deep.")
    if "\\u0000" in written and "\x00" in _all_text(value):
        raise PayloadHasNul(f"The {what} has a NUL character, which PostgreSQL does not store.")


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else []


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level := [part for part in level if isinstance(part, dict | list | tuple)]:
        depth += 1
        level = [inner for part in level for inner in _parts(part)]
    return depth


def _count_keys(value: Any) -> int:
    count, rest = 0, [value]
    while rest:
        part = rest.pop()
        count += len(part) if isinstance(part, dict) else 0
        rest += _parts(part)
    return count


def _all_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return "".join(_all_text(part) for pair in value.items() for part in pair)
    if isinstance(value, list | tuple):
        return "".join(map(_all_text, value))
    return ""
