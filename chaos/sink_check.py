"""Count the effects at the sinks after the chaos, and say what is wrong."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from chaos.sink_places import KINDS, Place
from models.engine import engine
from models.sql import sql

STATUSES: Final = sql("SELECT id, type, status FROM ledger.ingest_task WHERE starts_with(type, 'chaos.')")
REFUSED: Final = sql("SELECT count(*) FROM ledger.task_audit WHERE code IN ('late_success', 'lease_lost')")
UNFINISHED: Final = sql("SELECT gid FROM ledger.sink_transaction WHERE state NOT IN ('committed', 'aborted')")
LEASES: Final = sql("SELECT holder FROM ledger.task_lease")
PATIENCE_SECONDS: Final = 10.0  # until the servers have noticed that processes were killed
EXAMPLES: Final = 3


@dataclass(frozen=True, slots=True)
class Counted:
    """What was counted after the chaos."""

    tasks: int
    unfinished: Sequence[str]  # tasks that are not SUCCEEDED
    effects: int
    lost: Sequence[str]  # tasks that are SUCCEEDED without an effect, each with its sink
    doubled: Sequence[str]  # effects that happened more than once
    left_behind: Sequence[str]  # prepared transactions, locks, files, leases
    refused: int  # writes of workers that had lost their task

    @property
    def violations(self) -> list[str]:
        """Return what is wrong, as sentences."""
        found = {
            "tasks did not end as SUCCEEDED": self.unfinished,
            "effects of SUCCEEDED tasks are lost": self.lost,
            "effects happened more than once": self.doubled,
            "things were left behind": self.left_behind,
        }
        return [f"{len(what)} {words}: {examples(what)}" for words, what in found.items() if what]


def count(places: Mapping[str, Place]) -> Counted:
    """Count the effects of each task in each of its sinks."""
    with engine().connect() as connection:
        tasks = {id_: (type_.removeprefix("chaos."), status) for id_, type_, status in connection.execute(STATUSES)}
        refused = connection.execute(REFUSED).scalar_one()
    effects = {name: place.effects() for name, place in places.items()}
    lost: list[str] = []
    doubled: list[str] = []
    for id_, (kind, status) in tasks.items():
        for sink in KINDS[kind]:
            number = effects[sink][id_]
            if status == "SUCCEEDED" and not number:
                lost.append(f"{id_} in {sink}")
            elif number > 1:
                doubled.append(f"{id_} in {sink} ({number} times)")
    return Counted(
        tasks=len(tasks),
        unfinished=[f"{id_} ({kind}) is {status}" for id_, (kind, status) in tasks.items() if status != "SUCCEEDED"],
        effects=sum(found.total() for found in effects.values()),
        lost=lost,
        doubled=doubled,
        left_behind=_left_behind(places.values()),
        refused=refused,
    )


def examples(found: Sequence[str]) -> str:
    """Return the first ones, and how many there are beside them, as the end of a sentence."""
    more = f", and {len(found) - EXAMPLES} more" if len(found) > EXAMPLES else ""
    return f"{', '.join(found[:EXAMPLES])}{more}."


def _left_behind(places: Collection[Place]) -> list[str]:
    """Return what is still there after some seconds."""
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    while True:
        found = [f"{place.name}: {each}" for place in places for each in place.left_behind()] + _left_in_ledger()
        if not found or time.monotonic() > give_up_at:
            return found
        time.sleep(0.05)


def _left_in_ledger() -> list[str]:
    with engine().connect() as connection:
        gids = [f"ledger: the transaction {gid} is not finished" for gid in connection.scalars(UNFINISHED)]
        return gids + [f"ledger: a lease of {holder}" for holder in connection.scalars(LEASES)]
