"""Checks the addresses in OUTBOX_DESTINATIONS. No connection is made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from checks.result import Finding, fail, ok
from settings import Settings

REMEDY: Final = "correct its address in OUTBOX_DESTINATIONS; docs/outbox.md describes all kinds"


def check(settings: Settings) -> Iterator[Finding]:
    from outbox.destinations import UnknownDestination, open_destination  # noqa: PLC0415 - as in checks/kafka.py

    for name in sorted(settings.outbox_destinations):
        try:
            publisher = open_destination(name, settings).publisher
        except UnknownDestination as error:
            yield fail(f"destination.{name}", str(error), REMEDY)
            continue
        objection = getattr(publisher, "objection", None)
        publisher.close()
        yield fail(f"destination.{name}", objection, REMEDY) if objection else ok(f"destination.{name}", "can be used")
