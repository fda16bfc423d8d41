"""A simple model of tasks with partition keys. `test_key_machine.py` compares the real tasks with it."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

OPEN: Final = ("QUEUED", "RETRYING")
DONE: Final = ("SUCCEEDED", "DISCARDED")
BATCHES: Final = {"keys.hold": 3, "keys.skip": 4}
SKIPS: Final = "keys.skip"
MAX_ATTEMPTS: Final = 3
WAIT: Final = 0.5  # hours, after a failure


@dataclass
class Turn:
    """One task. `seq` is its position in its key."""

    type: str
    key: str
    seq: int
    status: str = "QUEUED"
    attempts: int = 0
    due: float = -math.inf
    isolated: bool = False
    token: uuid.UUID | None = None

    @property
    def blocks(self) -> bool:
        """True if the tasks behind it in its key must wait."""
        return self.status not in DONE and not (self.status == "DEAD" and self.type == SKIPS)

    def becomes(self, status: str, *, due: float | None = None) -> None:
        self.status, self.token = status, None
        self.due = self.due if due is None else due

    def fails(self, now: float, *, for_good: bool = False) -> None:
        self.attempts += 1
        if for_good or self.attempts >= MAX_ATTEMPTS:
            self.becomes("DEAD", due=-math.inf)
        else:
            self.becomes("RETRYING", due=now + WAIT)


Turns = Mapping[uuid.UUID, Turn]


def in_order(turns: Turns, key: str) -> list[uuid.UUID]:
    return sorted((id_ for id_, turn in turns.items() if turn.key == key), key=lambda id_: turns[id_].seq)


def head(turns: Turns, key: str) -> uuid.UUID | None:
    return next((id_ for id_ in in_order(turns, key) if turns[id_].blocks), None)


def admitted(turns: Turns, ids: Sequence[uuid.UUID], now: float) -> list[uuid.UUID]:
    """Return the tasks that a claim of `ids` must choose, ordered by position.

    It takes the heads of one kind in the order of `ids`, then fills the batch evenly with the tasks behind them.
    """
    due = [id_ for id_ in ids if turns[id_].status in OPEN and turns[id_].due <= now]
    heads = [id_ for id_ in due if head(turns, turns[id_].key) == id_]
    if not heads:
        return []
    first = turns[min(heads, key=lambda id_: (turns[id_].isolated, ids.index(id_)))]
    most = 1 if first.isolated else BATCHES[first.type]
    mine = [id_ for id_ in heads if (turns[id_].type, turns[id_].isolated) == (first.type, first.isolated)][:most]
    following: list[tuple[int, str, uuid.UUID]] = []
    if not first.isolated:
        for id_ in mine:
            following += _run(turns, id_, most // len(mine), now)
    chosen = mine + [id_ for _, _, id_ in sorted(following)[: most - len(mine)]]
    return sorted(chosen, key=lambda id_: turns[id_].seq)


def _run(turns: Turns, first: uuid.UUID, most: int, now: float) -> list[tuple[int, str, uuid.UUID]]:
    """Return the tasks behind `first`, up to the first one that cannot run in the same batch."""
    kind = turns[first]
    behind = [id_ for id_ in in_order(turns, kind.key) if turns[id_].seq > kind.seq and turns[id_].status not in DONE]
    found: list[tuple[int, str, uuid.UUID]] = []
    for place, id_ in enumerate(behind[:most]):
        turn = turns[id_]
        if turn.type != kind.type or turn.isolated or turn.status not in OPEN or turn.due > now:
            break
        found.append((place, kind.key, id_))
    return found
