"""Where each part of a running stack listens, and where its login is kept. Passwords are never part of it.

The addresses come from `stack.json`, so that `ps` shows what the running stack uses, whatever variables its caller has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from embedded.roles import FLOWER_USER, SERVER_ROLES
from settings import SERVER_VARIABLES, Settings, place

# The variables of stack.json; those of the servers are SERVER_VARIABLES.
API: Final = "API_URL"
FLOWER: Final = "FLOWER_URL"
WORKER_METRICS: Final = "WORKER_METRICS_URL"
SYSTEM_METRICS: Final = "SYSTEM_METRICS_URL"
RECEIPTS_METRICS: Final = "RECEIPTS_METRICS_URL"
KAFKA: Final = "KAFKA_BOOTSTRAP_SERVERS"

EXTERNAL_ROLES: Final = dict(zip(SERVER_VARIABLES, ("postgres", "broker", "redis"), strict=True))
_VARIABLES: Final = {
    **dict(zip(SERVER_ROLES, SERVER_VARIABLES, strict=True)),
    "worker": WORKER_METRICS,
    "system": SYSTEM_METRICS,
    "receipts": RECEIPTS_METRICS,
    "api": API,
    "flower": FLOWER,
}
_ENV: Final = "`manage.py env` prints it"


@dataclass(frozen=True, slots=True)
class Address:
    """Host and port, or the URL of a page, and a sentence that says where the login is kept."""

    address: str = ""
    login: str = ""


def address_of(role: str, settings: Settings) -> Address:
    """Return the address of a program of the stack; an empty one if the program does not listen."""
    url = settings.stack.get(_VARIABLES.get(role, ""), "")
    if not url:
        return Address()
    secrets = settings.home / "secrets.json"
    match role:
        case "postgres":
            return Address(place(url), f"{_ENV}; `postgres` in {secrets}")
        case "redis-broker" | "redis-receipts":
            return Address(place(url), f"{_ENV}; `redis` in {secrets}")
        case "api":
            return Address(url, "`manage.py token create` makes a token")
        case "flower":
            return Address(url, f"user {FLOWER_USER}; `flower` in {secrets}")
    return Address(url, "none")


def external_servers(stack: Mapping[str, str], running: set[str]) -> dict[str, Address]:
    """Return, by role, the servers that the stack uses and did not start."""
    found = {}
    for role, variable in zip(SERVER_ROLES, SERVER_VARIABLES, strict=True):
        if role not in running and (url := stack.get(variable)):
            found[EXTERNAL_ROLES[variable]] = Address(place(url), variable)
    if servers := stack.get(KAFKA):
        found["kafka"] = Address(servers, "KAFKA_OPTIONS")
    return found
