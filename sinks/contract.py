"""What a sink is: a place outside the ledger's transaction where the effect of a task takes place, and its guarantee.

    atomic         the ledger's own database: the effect commits together with SUCCEEDED
    keyed          the sink remembers the key of each effect; a repetition finds the key and does nothing
    two_phase      the sink prepares the effect, the ledger decides together with SUCCEEDED, the sink obeys
    script         one Redis script checks, writes and acknowledges (stream consumers only)
    at_least_once  the effect is repeated until it is confirmed, so it may happen twice

A sink states the conditions under which its guarantee holds; `manage.py sinks` prints them. For an interrupted task, a
sink can also be asked what became of the effects: `committed`, `not committed`, or `unknown` while it cannot be
reached. docs/exactly-once.md has the table of all sinks and of what each fault leads to.

After a lost lease a sink raises `LeaseLost`. A late worker can therefore waste work, but the guarantee does not depend
on that check: it may come too late. It depends on the key, or on the ledger's decision.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any, ClassVar, Protocol

from models.errors import CeleriacError, Misuse


class Guarantee(StrEnum):
    """How often the effect of a task happens in a sink, and why."""

    ATOMIC = "atomic"
    KEYED = "keyed"
    TWO_PHASE = "two_phase"
    SCRIPT = "script"
    AT_LEAST_ONCE = "at_least_once"


class EffectState(StrEnum):
    """What became of an effect. It is unknown only while the sink cannot be reached."""

    COMMITTED = "committed"
    NOT_COMMITTED = "not committed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Effect:
    """What a task did in a sink, or what is not known about it."""

    sink: str
    state: EffectState
    step: str | None = None
    detail: str | None = None


class UnknownSink(Misuse):
    """There is no such sink.

    A handler names a sink that SINKS does not have, or whose entry cannot be used.
    """

    code = "unknown_sink"
    remedy = "Add the sink to SINKS of the workers, or correct its name; `manage.py sinks` lists them."


class SinkNotReady(CeleriacError):
    """The sink is not ready.

    The table of a keyed sink is missing, a server does not allow prepared transactions, or a folder cannot be written.
    """

    code = "sink_not_ready"
    remedy = "Run `manage.py sinks prepare NAME`, then `manage.py sinks`, which says what is missing."


class SinkMisused(Misuse):
    """The sink cannot be used in this way.

    A handler called a method that this kind of sink does not have, or used it where it cannot keep its guarantee.
    """

    code = "sink_misused"
    remedy = "See docs/exactly-once.md: each kind of sink has its own method."


class TaskOfSink(Protocol):
    """What a sink needs to know about the running task (`sinks/task_sinks.py`)."""

    @property
    def task_id(self) -> uuid.UUID: ...

    @property
    def installation(self) -> uuid.UUID: ...

    def check_lease(self) -> None: ...


class TaskWithSteps(TaskOfSink, Protocol):
    """What a keyed sink needs to know besides."""

    def using_once(self, sink: str, step: str, *, where: str = "") -> AbstractContextManager[None]:
        """Raise SinkMisused if the handler has completed this step before, in this attempt."""
        ...


class Sink(ABC):
    """A configured sink. Each process opens it once; opening does not connect."""

    name: str
    guarantee: ClassVar[Guarantee]
    key_life: timedelta | None = None  # how long keys are remembered; None: for ever, or there are none

    @property
    @abstractmethod
    def conditions(self) -> Sequence[str]:
        """Return the conditions under which the guarantee holds, as sentences."""

    @abstractmethod
    def bind(self, task: Any) -> Any:
        """Return the object with which a handler writes to this sink for one task."""

    @abstractmethod
    def check(self) -> str:
        """Connect; return what was found in a few words, or raise SinkNotReady or Unreachable."""

    def effects(self, installation: uuid.UUID, task_id: uuid.UUID) -> Sequence[Effect]:
        """Ask the sink what it has committed for this task. May raise any error if it cannot be reached."""
        del installation, task_id
        return []

    def prepare(self) -> str:
        """Create what the sink needs, such as a table; return what was done. Safe to repeat."""
        return "nothing to prepare"

    def prune(self, installation: uuid.UUID) -> int:
        """Delete some of the keys that are older than the key life; return how many. Keys may also expire elsewhere."""
        del installation
        return 0

    @abstractmethod
    def close(self) -> None:
        """Close what is open."""
