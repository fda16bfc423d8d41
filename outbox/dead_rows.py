"""DEAD tasks and DEAD events: count what an operator's filters choose, and requeue or discard it in small batches.

Each batch is a transaction of its own that skips rows locked by others, so both actions are safe to interrupt, to
repeat, and to run from several places at once. A row that dies again meanwhile is not changed a second time.
`outbox/dead_events.py` and `tasks/operations/dead_tasks.py` describe their rows as `DeadRows`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from sqlalchemy import Connection, Engine, RowMapping, TextClause
from sqlalchemy.orm import Session

from models.sql import sql

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

BATCH: Final = 500
BATCHES_PER_SECOND: Final = 5
MAX_GROUPS: Final = 100
Values = dict[str, Any]
Id = TypeVar("Id")
Group = TypeVar("Group", bound="DataclassInstance")


@dataclass(frozen=True, slots=True)
class Filters:
    """Which DEAD rows are chosen. Without a filter, all are."""

    @property
    def is_all(self) -> bool:
        return self == type(self)()


@dataclass(frozen=True, slots=True)
class Counted(Generic[Group]):
    """The number of chosen rows, and the largest groups among them."""

    total: int
    groups: list[Group]


def batch_size(per_second: float | None) -> int:
    """Return a batch size that keeps a rate smooth: several small batches per second."""
    return BATCH if per_second is None else max(1, min(BATCH, int(per_second / BATCHES_PER_SECOND)))


def execute(db: Session, statement: TextClause, values: Values) -> RowMapping:
    """Change one batch; return the ids as `changed`, and the values with which the next batch begins."""
    return db.execute(statement, values).mappings().one()


@dataclass(frozen=True, slots=True)
class DeadRows(Generic[Id, Group]):
    """How the DEAD rows of a table are chosen, ordered, grouped and changed."""

    table: str
    chosen: str  # the condition; its parameters are the fields of the filters
    order: str  # the longest dead first
    columns: str  # what to group by: the fields of `group` except `count`
    group: type[Group]
    start: Callable[[Connection], Values]  # the values with which the first batch begins
    execute: Callable[[Session, TextClause, Values], RowMapping] = execute

    def count(self, connection: Connection, choice: Filters, *, limit: int | None = None) -> Counted[Group]:
        """Count the chosen rows by group, largest first. With a limit, count those that would be changed first."""
        names = ", ".join(field.name for field in dataclasses.fields(self.group) if field.name != "count")
        statement = sql(f"""
            SELECT {names}, count(*), CAST(sum(count(*)) OVER () AS bigint)
            FROM (SELECT {self.columns} FROM ledger.{self.table} WHERE {self.chosen}
                  ORDER BY {self.order} LIMIT :limit) AS longest_dead
            GROUP BY {names} ORDER BY count(*) DESC, {names} LIMIT {MAX_GROUPS}""")
        rows = connection.execute(statement, {**dataclasses.asdict(choice), "limit": limit}).all()
        return Counted(rows[0][-1] if rows else 0, [self.group(*row[:-1]) for row in rows])

    def in_batches(
        self,
        statement: TextClause,
        engine: Engine,
        choice: Filters,
        *,
        actor: str,
        reason: str | None = None,
        limit: int | None = None,
        batch: int = BATCH,
        **values: Any,
    ) -> Iterator[list[Id]]:
        """Change the chosen rows, longest dead first; yield the ids of each batch after its commit.

        `values` are further parameters of the statement.
        """
        with engine.connect() as connection:
            values |= {**dataclasses.asdict(choice), **self.start(connection), "actor": actor, "reason": reason or None}
        done = 0
        while limit is None or done < limit:
            values["batch"] = batch if limit is None else min(batch, limit - done)
            with Session(engine) as db:
                values |= self.execute(db, statement, values)
                db.commit()
            if not values["changed"]:
                return
            done += len(values["changed"])
            yield values["changed"]
