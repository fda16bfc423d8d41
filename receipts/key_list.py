"""The published half of the receipt keys: one key, and the list at `/.well-known/celeriac-keys.json`.

    {"keys": [{"keyId": "…", "algorithm": "Ed25519", "publicKey": "…", "activeFrom": "…", "retiredAt": null}]}

Verifying a receipt needs such a list and nothing else. A key's id is derived from the key, so a list cannot give a
known id to another key.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from models.errors import Misuse

ALGORITHM: Final = "Ed25519"
PUBLIC_BYTES: Final = 32


class BadKeyList(Misuse):
    """The file is not a list of receipt keys.

    A file given with --keys is not a copy of `/.well-known/celeriac-keys.json`, or it is damaged.
    """

    code = "bad_receipt_key_list"
    remedy = "Save `/.well-known/celeriac-keys.json` of the installation that signed the receipt again."


@dataclass(frozen=True, slots=True)
class Key:
    """The public half of a key."""

    key_id: str
    public: bytes
    active_from: datetime
    retired_at: datetime | None = None

    def published(self) -> dict[str, str | None]:
        """Return the key as the key list shows it."""
        return {
            "keyId": self.key_id,
            "algorithm": ALGORITHM,
            "publicKey": encode(self.public),
            "activeFrom": iso(self.active_from),
            "retiredAt": iso(self.retired_at) if self.retired_at else None,
        }


def read_key_list(path: Path) -> dict[str, bytes]:
    """Return the raw public keys of a saved key list by their ids, or raise BadKeyList."""
    try:
        document = json.loads(path.read_bytes())
        entries = document.get("keys") if isinstance(document, dict) else None
        if not isinstance(entries, list):
            raise ValueError('it must be an object with a list "keys"')
        return {key.key_id: key.public for key in map(parse_key, entries)}
    except OSError as error:
        raise BadKeyList(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:
        raise BadKeyList(f"{path} is not a list of receipt keys: {reason_of(error)}.") from None


def parse_key(entry: Any) -> Key:
    """Read one entry of a key list, or raise ValueError. Unknown fields are ignored; later versions may add some."""
    if not isinstance(entry, Mapping):
        raise ValueError("a key must be an object")
    if entry.get("algorithm") != ALGORITHM:
        raise ValueError(f"the algorithm of a key must be {ALGORITHM}")
    try:
        public = decode(entry["publicKey"])
    except (KeyError, ValueError, AttributeError):
        raise ValueError("publicKey must be base64url without padding") from None
    if len(public) != PUBLIC_BYTES or entry.get("keyId") != key_id_of(public):
        raise ValueError("keyId and publicKey do not belong together")
    retired_at = entry.get("retiredAt")
    active_from = _parse_time(entry.get("activeFrom"))
    return Key(key_id_of(public), public, active_from, None if retired_at is None else _parse_time(retired_at))


def key_id_of(public: bytes) -> str:
    """Return the id of a raw public key."""
    return hashlib.sha256(public).hexdigest()[:16]


def encode(raw: bytes) -> str:
    """Return base64url without padding."""
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def decode(text: str) -> bytes:
    """Read base64url without padding, or raise ValueError. Bytes have one spelling only."""
    raw = base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    if encode(raw) != text:
        raise ValueError("not base64url without padding")
    return raw


def iso(at: datetime) -> str:
    """Return a time in UTC as JSON shows it."""
    return at.astimezone(UTC).isoformat()


def reason_of(error: Exception) -> str:
    """Return why a file could not be parsed. The text of such an error never quotes the file."""
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def _parse_time(given: Any) -> datetime:
    try:
        at = datetime.fromisoformat(given)
    except (TypeError, ValueError):
        at = None
    if at is None or at.tzinfo is None:
        raise ValueError("activeFrom and retiredAt must be times such as 2026-11-16T10:30:00+00:00")
    return at
