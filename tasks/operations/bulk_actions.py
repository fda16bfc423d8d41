"""Bulk actions: requeue, discard or run now all tasks that match a search; what is to be done, and the record of it.

    waiting ──claim──► running ─┬─────────► done
       ▲                        ├─────────► canary failed   the others were left unchanged
       └───── continue ─────────┴─────────► stopped         by an operator, an error or the end of its process

The row in `bulk_action` is authoritative. A process claims it with a random token and works it off (`bulk_run.py`);
every write of that process names the token, so it changes nothing more when the action was stopped or has been given up
for lost. An action whose process has died is `running` without a sign of life; when it is continued, it begins again
with the tasks that have not changed since the preview.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Connection, Engine, TextClause

from models.bulk_actions import BulkState, BulkVerb
from models.errors import CeleriacError, Misuse
from models.sql import sql
from models.status import TaskStatus
from tasks.operations import bulk_statements as statements
from tasks.operations.listing import Cursor, TaskFilter, columns_of, cursor_values, match_values
from tasks.operations.sink_effects import key_lives

LOST_SECONDS: Final = 60  # without a sign of life; then the action can be continued
LONGEST_REASON: Final = 500
MOST_CANARIES: Final = 100
LONGEST_CANARY_SECONDS: Final = 3600
FASTEST: Final = 100_000.0  # per second
SLOWEST: Final = 0.01
WITH_CANARY: Final = (BulkVerb.REQUEUE, BulkVerb.RUN_NOW)
# Its process gives no sign of life.
IS_LOST: Final = (
    f"(state = 'running' AND seen_at < (SELECT ledger.ledger_now()) - CAST('{LOST_SECONDS} s' AS interval))"
)


class UnknownBulkAction(CeleriacError):
    """There is no such bulk action.

    The id in the address of the console is not in the ledger.
    """

    code = "unknown_bulk_action"
    remedy = "Look it up at /console/bulk, which lists all bulk actions."
    http_status = 404


@dataclass(frozen=True, slots=True)
class Order:
    """What an operator has confirmed."""

    verb: BulkVerb
    query: str
    chosen: TaskFilter
    as_of: datetime  # of the preview: tasks that have changed since then are left as they are
    reason: str
    per_second: float | None = None
    canary: int | None = None
    canary_seconds: int | None = None
    reset_steps: bool = False
    accept_duplicates: bool = False
    id: uuid.UUID = field(default_factory=uuid.uuid4)  # an order that is given twice is one action


@dataclass(frozen=True, slots=True)
class PreviewGroup:
    """Tasks of one status, type and error code, and the message of one of them."""

    status: TaskStatus
    type: str
    error_code: str | None
    error_message: str | None
    count: int


@dataclass(frozen=True, slots=True)
class Preview:
    """What an action would change."""

    groups: list[PreviewGroup]
    total: int
    left_out: int  # of these, their sinks have forgotten their keys
    is_exact: bool  # False: there are more tasks than were read


@dataclass(frozen=True, slots=True)
class BulkRow:
    """A bulk action as it is stored."""

    id: uuid.UUID
    action: str
    query: str
    filter: Any
    as_of: datetime
    reason: str
    actor: str
    per_second: float | None
    canary: int | None
    canary_seconds: int | None
    canary_ids: list[uuid.UUID] | None
    canary_statuses: dict[str, int] | None
    reset_steps: bool
    accept_duplicates: bool
    state: str
    matched: int | None
    left_out: int | None
    changed: int
    sample: list[uuid.UUID]
    message: str | None
    created_at: datetime
    started_at: datetime | None
    seen_at: datetime | None
    finished_at: datetime | None
    is_lost: bool

    @property
    def verb(self) -> BulkVerb:
        return BulkVerb(self.action)

    @property
    def wanted(self) -> int | None:
        """Return how many tasks it is to change; None before they are counted."""
        return None if self.matched is None else self.matched - (self.left_out or 0)

    @property
    def can_stop(self) -> bool:
        return self.state in (BulkState.WAITING, BulkState.RUNNING)

    @property
    def can_go_on(self) -> bool:
        return self.state == BulkState.STOPPED or self.is_lost

    @property
    def cursor(self) -> Cursor:
        return Cursor(self.created_at, self.id)


COLUMNS: Final = columns_of(BulkRow).replace("is_lost", IS_LOST)

# create: → waiting. A form that is sent twice creates one action.
CREATE: Final = sql("""
    INSERT INTO ledger.bulk_action (id, action, query, filter, as_of, reason, actor, per_second, canary, canary_seconds,
                                    reset_steps, accept_duplicates, created_at)
    SELECT :id, :verb, :query, CAST(:filter AS jsonb), least(:as_of, at), :reason, :actor, :per_second, :canary,
           :canary_seconds, :reset_steps, :accept_duplicates, at
    FROM (SELECT ledger.ledger_now() AS at) AS clock ON CONFLICT (id) DO NOTHING
""")
READ: Final = sql(f"SELECT {COLUMNS} FROM ledger.bulk_action WHERE id = :id")
LIST: Final = sql(f"""
    SELECT {COLUMNS} FROM ledger.bulk_action WHERE (created_at, id) < (:before_at, :before_id)
    ORDER BY created_at DESC, id DESC LIMIT :limit
""")
# stop: waiting | running → stopped. The process that works it off notices at its next write.
STOP: Final = sql("""
    UPDATE ledger.bulk_action
    SET state = 'stopped', token = NULL, finished_at = (SELECT ledger.ledger_now()),
        message = concat_ws(' ', message, CAST(:message AS text))
    WHERE id = :id AND state IN ('waiting', 'running') RETURNING id
""")
# go_on: stopped, or running without a sign of life → waiting.
GO_ON: Final = sql(f"""
    UPDATE ledger.bulk_action
    SET state = 'waiting', token = NULL, finished_at = NULL, message = concat_ws(' ', message, CAST(:message AS text))
    WHERE id = :id AND (state = 'stopped' OR {IS_LOST}) RETURNING id
""")


def preview(connection: Connection, verb: BulkVerb, chosen: TaskFilter, *, as_of: datetime) -> Preview:
    """Count what the action would change, by status, type and error, up to a ceiling."""
    ceiling = statements.COUNT_CEILING
    values = chosen_values(connection, verb, chosen, as_of) | {"ceiling": ceiling}
    rows = connection.execute(statements.preview(verb, chosen), values).all()
    read, total, left_out = rows[0][:3]
    groups = [PreviewGroup(TaskStatus(row.status), *row[4:]) for row in rows if row.status]
    return Preview(groups, total, left_out, is_exact=read < ceiling)


def chosen_values(connection: Connection, verb: BulkVerb, chosen: TaskFilter, as_of: datetime) -> dict[str, Any]:
    """Return the parameters that say which tasks are chosen. Only running a dead task again can repeat an effect."""
    lives = key_lives(connection) if verb is BulkVerb.REQUEUE else {}
    seconds = [life.total_seconds() for life in lives.values()]
    return match_values(chosen) | {"as_of": as_of, "limited_types": list(lives), "limited_seconds": seconds}


def create(connection: Connection, order: Order, *, actor: str) -> None:
    """Write down an action, which waits until a process claims it. Raises Misuse."""
    _check(order)
    values = {
        **{name: getattr(order, name) for name in ("id", "verb", "query", "as_of", "per_second")},
        **{name: getattr(order, name) for name in ("canary", "canary_seconds", "reset_steps", "accept_duplicates")},
        **{"reason": order.reason.strip(), "actor": actor, "filter": json.dumps(filter_to_json(order.chosen))},
    }
    connection.execute(CREATE, values)


def read(connection: Connection, id_: uuid.UUID) -> BulkRow:
    """Return the action. Raises UnknownBulkAction."""
    row = connection.execute(READ, {"id": id_}).one_or_none()
    if row is None:
        raise UnknownBulkAction(f"There is no bulk action {id_}.")
    return BulkRow(*row)


def list_actions(connection: Connection, *, before: Cursor | None, limit: int) -> list[BulkRow]:
    """Return the latest actions."""
    return [BulkRow(*row) for row in connection.execute(LIST, cursor_values(before, None) | {"limit": limit})]


def stop(engine: Engine, id_: uuid.UUID, *, actor: str) -> None:
    """Stop an action: nothing changes after the return. Raises UnknownBulkAction, and Misuse if it has ended."""
    _change(engine, STOP, id_, f"Stopped by {actor}.", "It has ended already.")


def go_on(engine: Engine, id_: uuid.UUID, *, actor: str) -> None:
    """Continue an action that was stopped, or whose process is lost. Raises UnknownBulkAction and Misuse."""
    _change(engine, GO_ON, id_, f"Continued by {actor}.", "It can be continued after it was stopped.")


def filter_to_json(chosen: TaskFilter) -> dict[str, Any]:
    """Return what is set in a filter as a JSON object."""
    found = {name: value for name, value in asdict(chosen).items() if value is not None}
    for name, value in found.items():
        if isinstance(value, datetime):
            found[name] = value.isoformat()
        elif not isinstance(value, str):
            found[name] = sorted(map(str, value))
    return found


def filter_from_json(stored: Mapping[str, Any]) -> TaskFilter:
    """Return the filter that was stored."""
    values = dict(stored)
    values["statuses"] = frozenset(map(TaskStatus, values.get("statuses", ())))
    for name in ("since", "until"):
        if name in values:
            values[name] = datetime.fromisoformat(values[name])
    if "ids" in values:
        values["ids"] = [uuid.UUID(each) for each in values["ids"]]
    return TaskFilter(**values)


def _change(engine: Engine, statement: TextClause, id_: uuid.UUID, message: str, refusal: str) -> None:
    with engine.begin() as connection:
        if connection.execute(statement, {"id": id_, "message": message}).one_or_none() is None:
            raise Misuse(f"The bulk action is {read(connection, id_).state}. {refusal}")


def _check(order: Order) -> None:
    """Raise Misuse if a value cannot be used."""
    if order.chosen.principal is not None:
        raise Misuse("A bulk action cannot be limited to the tasks of one principal.")
    if not 0 < len(order.reason.strip()) <= LONGEST_REASON:
        raise Misuse(f"Give a reason of at most {LONGEST_REASON} characters. It is kept in the history of each task.")
    if order.per_second is not None and not SLOWEST <= order.per_second <= FASTEST:
        raise Misuse(f"The rate must be between {SLOWEST:g} and {FASTEST:,.0f} tasks per second.")
    if order.verb is not BulkVerb.REQUEUE and (order.reset_steps or order.accept_duplicates):
        raise Misuse("Only dead tasks that are requeued can forget their steps, or repeat an effect.")
    if order.canary is None:
        return
    if order.verb not in WITH_CANARY:
        raise Misuse("Only tasks that run again can be canaries.")
    if not 1 <= order.canary <= MOST_CANARIES:
        raise Misuse(f"There can be 1 to {MOST_CANARIES} canaries.")
    if order.canary_seconds is None or not 1 <= order.canary_seconds <= LONGEST_CANARY_SECONDS:
        raise Misuse(f"Wait for canaries between one second and {LONGEST_CANARY_SECONDS // 60} minutes.")
