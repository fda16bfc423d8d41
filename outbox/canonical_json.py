"""Write a payload as canonical JSON, so that equal payloads have equal hashes in every process.

A payload that cannot be stored is refused before anything is written; each reason has its own code.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Final

from models.errors import Misuse

MAX_BYTES: Final = 1_048_576
MAX_DEPTH: Final = 64
MAX_KEYS: Final = 10_000
# A text with fewer characters has neither a number of 4,300 digits nor 10,000 keys.
_SHORT: Final = 4_300
# A number with an exponent of three digits, which may be more than Python can express. The first search is fast.
_LONG_EXPONENT: Final = re.compile(r"[eE]\+?\d{3}")
_HUGE_NUMBER: Final = re.compile(r"(?:^|[:,\[])\s*-?\d+(?:\.\d+)?[eE]\+?\d{3}")
# Text, to step over it; and numbers that PostgreSQL stores in another form: with an exponent, and negative zero.
_STORED_DIFFERENTLY: Final = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?e[+-]\d+|-0\.0(?!\d)')


class BadPayload(Misuse):
    """The payload is not valid JSON.

    A payload, result or context has a value that JSON cannot express, such as NaN, or an unpaired surrogate.
    """

    code = "payload_not_json"
    remedy = "Submit only null, booleans, finite numbers, text, lists and objects with text keys."


class PayloadTooLarge(BadPayload):
    """The payload is larger than 1,048,576 bytes of JSON.

    A payload, result or context exceeds the limit when it is written as JSON.
    """

    code = "payload_too_large"
    remedy = "Store large content elsewhere, and put its address into the payload."
    http_status = 413


class PayloadTooDeep(BadPayload):
    """The payload is nested more than 64 levels deep.

    Lists and objects are nested inside each other beyond this limit.
    """

    code = "payload_too_deep"
    remedy = "Flatten the payload, or store it elsewhere and submit its address."


class NumberTooLong(BadPayload):
    """A number has more than 4,300 digits.

    Python reads no whole number that is longer, because that would be slow.
    """

    code = "payload_number_too_long"
    remedy = "Send the number as text."


class TooManyKeys(BadPayload):
    """The payload has more than 10,000 keys.

    All objects in the payload together have more keys than allowed.
    """

    code = "payload_too_many_keys"
    remedy = "Split the task into several, or store the content elsewhere and submit its address."


class PayloadHasNul(BadPayload):
    """The payload contains a NUL character, which PostgreSQL cannot store.

    A text or a key contains the character U+0000.
    """

    code = "payload_has_nul"
    remedy = "Remove the character `\\u0000`, or encode binary content as Base64."


def canonical_json(value: Any, *, what: str = "payload") -> str:
    """Return JSON with sorted keys and without spaces, or raise BadPayload. `what` names the value in the message."""
    try:
        written = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        size = len(written.encode())
    except UnicodeEncodeError:
        raise BadPayload(f"The {what} contains an unpaired surrogate, which is not valid text.") from None
    except RecursionError:
        raise _too_deep(what) from None
    except (TypeError, ValueError) as error:
        raise BadPayload(f"The {what} is not valid JSON: {error}.") from None
    if size > MAX_BYTES:
        raise PayloadTooLarge(f"The {what} has {size:,} bytes; at most {MAX_BYTES:,} are allowed.")
    _check_shape(value, written, what)
    return written


def checked_json(written: str) -> str:
    """Return the text if PostgreSQL finds every fault that it may have, otherwise canonical JSON; or raise BadPayload.

    The cast to jsonb refuses what is not JSON, NaN, NUL characters and unpaired surrogates. Parsing a text only to
    learn the same would take most of the time that a saver has for a message.
    """
    is_huge = _LONG_EXPONENT.search(written) and _HUGE_NUMBER.search(written)
    if is_huge or len(written) >= _SHORT or written.count("{") + written.count("[") > MAX_DEPTH:
        return canonical_json(json.loads(written))
    return written


def payload_sha(written: str) -> str:
    """Return the SHA-256 of canonical JSON, in hexadecimal. Numbers are hashed as the digits that the database stores.

    The database computes the same hash for a plain INSERT (`outbox_canonical_json` in the migration).
    """
    if "e+" in written or "e-" in written or "-0.0" in written:
        written = _STORED_DIFFERENTLY.sub(_as_stored, written)
    return hashlib.sha256(written.encode()).hexdigest()


def _as_stored(found: re.Match[str]) -> str:
    text = found[0]
    if text.startswith('"'):
        return text
    return "0.0" if text == "-0.0" else format(Decimal(text), "f")


def _check_shape(value: Any, written: str, what: str) -> None:
    """Walk through the value only if its text looks suspicious: few colons are few keys, few brackets are not deep."""
    if written.count(":") > MAX_KEYS and _count_keys(value) > MAX_KEYS:
        raise TooManyKeys(f"The {what} has more than {MAX_KEYS:,} keys.")
    if written.count("{") + written.count("[") > MAX_DEPTH and max(depth for depth, _ in _parts(value)) > MAX_DEPTH:
        raise _too_deep(what)
    if "\\u0000" in written and any(isinstance(part, str) and "\x00" in part for _, part in _parts(value)):
        raise PayloadHasNul(f"The {what} contains a NUL character, which PostgreSQL cannot store.")


def _count_keys(value: Any) -> int:
    return sum(len(part) for _, part in _parts(value) if isinstance(part, dict))


def _parts(value: Any) -> Iterator[tuple[int, Any]]:
    """Yield every value and key, with the number of lists and objects around it and including it."""
    left = [(0, value)]
    while left:
        depth, part = left.pop()
        if isinstance(part, dict | list | tuple):
            depth += 1
            left += [(depth, inner) for inner in part]
        if isinstance(part, dict):
            left += [(depth, inner) for inner in part.values()]
        yield depth, part


def _too_deep(what: str) -> PayloadTooDeep:
    return PayloadTooDeep(f"The {what} is nested more than {MAX_DEPTH} levels deep.")
