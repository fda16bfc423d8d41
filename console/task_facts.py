"""Read what the page of a task shows, and leave out what the visitor may not see.

The ledger is read first, without anything else being asked. Then the broker and the sinks are asked at the same time,
with no transaction open (`slow_answers.py`). What a visitor without `operate` may not see is replaced at once, by the
rules of `api/visible_errors.py`, so that no part of the page has it.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Final

from sqlalchemy import Connection

import settings
from api.tokens import Scope, Token
from api.visible_errors import show_effect, show_reason, show_task, show_transition
from console.slow_answers import answers, broker_questions, sink_questions
from documents.store import TYPE as UPLOADS
from models.engine import engine
from models.errors import Unreachable
from models.status import TaskStatus
from receipts import rows
from receipts.custody import find_of_upload
from receipts.receipt import Receipt
from sinks.contract import Effect
from tasks import broker
from tasks.core.registered_types import registered_type_names
from tasks.operations.sink_effects import effects_of, key_lives, sinks_by_type
from tasks.operations.task_details import Details, StoredTask, read_details
from tasks.operations.task_outbox import TaskEvent, is_unreachable, read_events
from tasks.operations.task_steps import StoredStep, read_steps
from tasks.operations.why_waiting import QueueState, Reason, ReasonCode, read_queue, reasons

NO_ANSWER = "The broker does not answer."
MOST_TRANSITIONS: Final = 2000  # a task that runs every minute has a million in two years


@dataclass(frozen=True, slots=True)
class Facts:
    """What the ledger knows about a task."""

    details: Details
    known_types: list[str]
    sinks: list[str]
    key_life: timedelta | None  # how long the sinks of a DEAD task remember its effects; None: for ever
    steps: list[StoredStep]
    events: list[TaskEvent]
    is_unreachable: bool  # the broker was, when a wake-up for the queue was last tried
    receipt: Receipt | None

    @property
    def are_keys_forgotten(self) -> bool:
        """Return whether a sink no longer remembers what this DEAD task has done."""
        return self.key_life is not None and self.details.task.created_at < self.details.now - self.key_life


@dataclass(frozen=True, slots=True)
class SinkEffects:
    """What the task has done in one sink; None if the sink has not answered in time."""

    sink: str
    effects: list[Effect] | None


def read_facts(task_id: uuid.UUID) -> Facts:
    """Return what the ledger knows. Raises UnknownTask."""
    with engine().connect() as connection:
        details = read_details(connection, task_id, most_transitions=MOST_TRANSITIONS)
        task = details.task
        is_open = task.status in (TaskStatus.QUEUED, TaskStatus.RETRYING)
        return Facts(
            details,
            registered_type_names(connection),
            sinks_by_type(connection).get(task.type, []),
            key_lives(connection).get(task.type) if task.status == TaskStatus.DEAD else None,
            read_steps(connection, task_id),
            read_events(connection, details),
            is_unreachable(connection, task.queue) if is_open else False,
            _find_receipt(connection, task),
        )


async def ask_servers(facts: Facts) -> tuple[int | None, list[SinkEffects]]:
    """Return how many messages wait in the broker's queue, if it answers, and what the sinks say about the task."""
    task = facts.details.task
    depth: list[Future[int | None]] = []
    if task.status in (TaskStatus.QUEUED, TaskStatus.RETRYING):
        depth = [broker_questions().ask(task.queue, partial(_count_messages, task.queue))]
    asked: list[Future[list[Effect]]] = [
        sink_questions().ask((sink, task.task_id, task.status), partial(effects_of, task.task_id, task.status, [sink]))
        for sink in facts.sinks
    ]
    found: Sequence[object] = await answers([*depth, *asked])  # type: ignore[list-item]
    effects = [
        SinkEffects(sink, answer if isinstance(answer, list) else None)
        for sink, answer in zip(facts.sinks, found[len(depth) :], strict=True)
    ]
    waiting = found[0] if depth else None
    return waiting if isinstance(waiting, int) else None, effects


def why(facts: Facts, waiting: int | None, token: Token) -> list[Reason]:
    """Return why the task is not running, as the token may read it. Which workers consume a queue, the ledger knows."""
    details = facts.details

    def state_of(queue: str) -> QueueState:
        if waiting is None:
            raise Unreachable(NO_ANSWER)
        if settings.current().ingest_queue == "kafka":
            return QueueState(waiting, None)
        return QueueState(waiting, frozenset(each.worker for each in details.live_workers if queue in each.queues))

    found = reasons(details, settings.current(), known_types=facts.known_types, read_queue=state_of)
    shown = [Reason(each.code, _sentence(each, facts, token)) for each in found]
    if (
        waiting is None
        and not details.live_workers
        and any(each.code == ReasonCode.BROKER_UNREACHABLE for each in shown)
    ):
        shown.append(Reason(ReasonCode.NO_WORKER, _no_worker(details)))  # the ledger knows it without the broker
    return shown


def hide(facts: Facts, token: Token) -> Facts:
    """Return the facts without what the token may not see."""
    if token.has_scope(Scope.OPERATE):
        return facts
    details = facts.details
    shown = show_task(details.task, token)
    task = replace(details.task, error_message=shown["errorMessage"], last_error=shown["lastError"])
    transitions = [
        replace(each, message=visible["message"], actor=visible["actor"])
        for each, visible in ((each, show_transition(each, token)) for each in details.transitions)
    ]
    return replace(
        facts,
        details=replace(
            details,
            task=task,
            transitions=transitions,
            lease=details.lease and replace(details.lease, holder=""),
            wakeups=[replace(each, locked_by=None, last_error=None) for each in details.wakeups],
            audits=[],
            pause=details.pause and replace(details.pause, actor="", reason=None),
            live_workers=[],
        ),
        steps=[],  # their outputs are in no answer of the API
        events=[replace(each, locked_by=None, last_error=None) for each in facts.events],
    )


def hide_effects(found: Sequence[SinkEffects], token: Token) -> list[SinkEffects]:
    """Return the effects without the addresses of sinks, if the token may not see them."""
    return [
        SinkEffects(
            each.sink,
            each.effects and [replace(effect, detail=show_effect(effect, token)["detail"]) for effect in each.effects],
        )
        for each in found
    ]


def _find_receipt(connection: Connection, task: StoredTask) -> Receipt | None:
    found = rows.find(connection, task.task_id)
    if found is None and task.type == UPLOADS:
        return find_of_upload(connection, task.task_id, task.created_at)
    return found


def _count_messages(queue: str) -> int | None:
    try:
        if settings.current().ingest_queue == "kafka":
            return read_queue(queue).waiting
        return broker.depths([queue], patience_seconds=broker.SHOWN_SECONDS)[queue]
    except Unreachable:
        return None


def _sentence(reason: Reason, facts: Facts, token: Token) -> str:
    if reason.code == ReasonCode.NO_WORKER:
        return _no_worker(facts.details)
    text = str(show_reason(reason, token)["message"])
    if reason.code == ReasonCode.WAKEUP_IN_OUTBOX and facts.is_unreachable:
        return f"{text} The circuit of {facts.details.task.queue} is open: the broker gave no answer when it was tried."
    return text


def _no_worker(details: Details) -> str:
    return f"No worker consumes its queue {details.task.queue}: start `celery -A tasks worker`."
