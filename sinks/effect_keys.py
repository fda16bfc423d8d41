"""The key of an effect: what makes a repetition recognisable. All keyed sinks choose it here."""

from __future__ import annotations

from sinks.contract import SinkMisused


def effect_key(
    *, business_key: str | None = None, event_id: str | None = None, original_message_id: str | None = None
) -> str:
    """Return the key of an effect: the business key if there is one, else the event id, else the message id.

    A business key names the effect itself, whatever message asks for it. An event id survives a message that is
    published again, if its producer keeps it. The id of the original message survives redelivery only.
    """
    given = {"business": business_key, "event": event_id, "message": original_message_id}
    for kind, key in given.items():
        if key:
            return f"{kind}:{key}"  # the kind keeps an order with the number 17 and an event with the id 17 apart
    raise SinkMisused("The effect has no key: give a business key, an event id or x-original-message-id.")
