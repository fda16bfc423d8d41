"""Keys of Redis that one script may change together: in a cluster, they must have the same hash tag."""

from __future__ import annotations

from collections.abc import Iterable

from sinks.contract import SinkMisused


def hash_tag(key: str) -> str:
    """Return the part of a key that decides where it is stored: what the first braces contain, or the whole key."""
    tag, closed, _ = key.partition("{")[2].partition("}")
    return tag if closed and tag else key


def key_beside(key: str, name: str) -> str:
    """Return the name of a key of ours with the hash tag of `key`."""
    made = f"celeriac:{{{hash_tag(key)}}}:{name}"
    if hash_tag(made) != hash_tag(key):
        raise SinkMisused(f"The key {key!r} has an unpaired brace: use {{ and }} for a hash tag only.")
    return made


def require_same_hash_tag(key: str, others: Iterable[str]) -> None:
    """Raise SinkMisused, with an example, unless all keys are stored together."""
    for other in others:
        if hash_tag(other) != hash_tag(key):
            raise SinkMisused(
                f"The keys {key!r} and {other!r} must share one hash tag, so that one script can change both:"
                f" name the second one, for example, {f'{{{hash_tag(key)}}}:{other}'!r}."
            )
