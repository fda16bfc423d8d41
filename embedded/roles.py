"""The programs of a stack by name."""

from __future__ import annotations

import signal
from typing import Final

SUPERVISOR: Final = "supervisor"
SERVER_ROLES: Final = ("postgres", "redis-broker", "redis-receipts")
ROLES: Final = (*SERVER_ROLES, "worker", "system", "receipts", "api", "flower", "beat")

# First the ticks stop, then the work, then the servers. The roles of one step are stopped together.
STOP_ORDER: Final = (("beat",), ("worker", "system", "receipts", "api", "flower"), SERVER_ROLES)
STOP_SIGNALS: Final = {"postgres": signal.SIGINT}  # "fast shutdown": roll back, write a checkpoint, end

PORTS: Final = {"postgres": 54329, "redis-broker": 63790, "redis-receipts": 63791, "api": 8000, "flower": 5555}
FLOWER_USER: Final = "celeriac"
