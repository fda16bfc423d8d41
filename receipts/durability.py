"""Whether a Redis server may answer `accepted`: its answer must mean that the entry is on its disk.

With `appendfsync always`, Redis writes and syncs what a round of its event loop has changed before it answers, so the
reply to XADD is the receipt. `no-appendfsync-on-rewrite yes` suspends that silently, eviction deletes entries, and in a
cluster one script cannot write both the claim and the entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

WANTED: Final = {
    "appendonly": "yes",
    "appendfsync": "always",
    "no-appendfsync-on-rewrite": "no",
    "maxmemory-policy": "noeviction",
}
CLUSTER: Final = "cluster-enabled"
READ: Final = (*WANTED, CLUSTER)


def fault_of(found: Mapping[str, str | None]) -> str | None:
    """Return why a server with this configuration is not durable, or None. A setting that cannot be read is a fault."""
    for name, wanted in WANTED.items():
        value = found.get(name)
        if value is None:
            return f"its setting {name} cannot be read (CONFIG GET)"
        if value != wanted:
            return f"{name} is {value}; it must be {wanted}"
    return "it is a cluster; use a single server, with replicas if you like" if found.get(CLUSTER) == "yes" else None
