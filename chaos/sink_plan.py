"""Which worker dies where: every window as often as any other, in random order."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tasks.testing.windows import Window

RECOVERY: Final = "recovery"
RECLAIM: Final = "reclaim"
RECOVERY_WINDOWS: Final = (
    Window("recovery.after_rows"),
    Window("recovery.after_obeyed"),
    Window("recovery.after_obeyed", 2),
)
# Of each wave, one process in so many is killed at a random moment, or suspended until its lease is over.
RANDOM_SHARE: Final = 12
SUSPENDED_SHARE: Final = 12


@dataclass(frozen=True, slots=True)
class Job:
    """A process that is to be killed at a window, or at a random moment if there is none; or suspended at a window."""

    kind: str  # of a task, or `recovery` or `reclaim`
    window: Window | None
    is_suspended: bool = False

    def __str__(self) -> str:
        return f"{self.kind}: {self.window or 'a random moment'}"


class Plan:
    """Deals the windows like cards: no window comes again before all others have come."""

    def __init__(self, windows: Mapping[str, Sequence[Window]], chance: random.Random) -> None:
        self.windows = windows  # of each kind of task, in the order in which a worker passes them
        self.chance = chance
        self.hits = Counter[str]()
        self._all = [Job(kind, window) for kind, found in windows.items() for window in found]
        self._all += [Job(RECOVERY, window) for window in RECOVERY_WINDOWS]
        self._deck: deque[Job] = deque()
        self.hits.update({str(job): 0 for job in self._all})

    def deal(self, count: int) -> list[Job]:
        """Return the jobs of the next wave: `count` that are killed at a window, and some others."""
        jobs = [self._next() for _ in range(count)]
        others = list(self.windows)
        jobs += [Job(self.chance.choice([*others, RECOVERY, RECLAIM]), None) for _ in range(1 + count // RANDOM_SHARE)]
        for _ in range(1 + count // SUSPENDED_SHARE):
            kind = self.chance.choice(others)
            jobs.append(Job(kind, self.chance.choice(self.windows[kind]), is_suspended=True))
        self.chance.shuffle(jobs)
        return jobs

    def later_window(self, job: Job) -> Window | None:
        """Return a window that a suspended worker of this job will pass after it was continued, or None."""
        windows = self.windows[job.kind]
        later = windows[windows.index(job.window) + 1 :] if job.window else []
        return self.chance.choice(later) if later else None

    def note_hit(self, job: Job) -> None:
        self.hits[str(job)] += 1

    def put_back(self, job: Job) -> None:
        """Deal a job again whose process has not passed its window."""
        if job.window and not job.is_suspended:
            self._deck.append(job)

    def rare(self, fewest: int) -> list[Job]:
        """Return a job for each window that was hit less often than that."""
        return [job for job in self._all if self.hits[str(job)] < fewest]

    def _next(self) -> Job:
        if not self._deck:
            self._deck.extend(self.chance.sample(self._all, len(self._all)))
        return self._deck.popleft()
