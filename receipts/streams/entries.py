"""An entry of a stream, and the batch of entries that a handler gets.

An entry may say in its fields, or in the JSON of its field `headers`, which message it repeats:
`x-original-message-id`. Its field `id` is the id of its event; the outbox writes these fields, too
(`outbox/publishers/redis_stream.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from models.driver_values import storable
from sinks.contract import UnknownSink
from sinks.effect_keys import effect_key

ORIGINAL_MESSAGE_ID: Final = "x-original-message-id"


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry. Bytes that are not UTF-8 are in its fields as surrogates."""

    id: str
    fields: Mapping[str, str]

    @property
    def headers(self) -> Mapping[str, Any]:
        """Return the headers, or none if the field is not a JSON object."""
        if "headers" not in self.fields:
            return {}
        try:
            found = json.loads(self.fields["headers"])
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def event_id(self) -> str | None:
        return self.fields.get("id")

    @property
    def original_message_id(self) -> str | None:
        found = self.fields.get(ORIGINAL_MESSAGE_ID) or self.headers.get(ORIGINAL_MESSAGE_ID)
        return str(found) if found else None

    def effect_key(self, business_key: str | None = None) -> str:
        """Return the key of the effect of this entry in a keyed sink."""
        message_id = self.original_message_id or self.id
        key = effect_key(business_key=business_key, event_id=self.event_id, original_message_id=message_id)
        if key == storable(key):
            return key
        return f"sha256:{hashlib.sha256(key.encode(errors='surrogateescape')).hexdigest()}"  # JSON has no such text


@dataclass(frozen=True, slots=True)
class Batch:
    """What a handler gets: entries in the order of the stream, the state of the shard, and its sinks.

    `state` is a JSON object that the handler may change. It is stored with the checkpoint and restored after a restart;
    without CHECKPOINT_DEFER_ACK it is lost when the shard is handed over.
    """

    entries: Sequence[Entry]
    state: dict[str, Any]
    sinks: Mapping[str, Any]

    def sink(self, name: str) -> Any:
        """Return the object with which the handler writes to a sink of its consumer."""
        if name not in self.sinks:
            known = ", ".join(sorted(self.sinks)) or "none"
            raise UnknownSink(f"This consumer has no sink {name!r}. Known: {known}.")
        return self.sinks[name]
