"""How far a workflow is: its stages, which of them are done, and what they have put out.

A stage is done when its step is stored (`workflows/run.py`). The first stage without a step is the one that runs, that
has failed or that comes next; the status of the task says which.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Container, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import Connection

from models.sql import sql
from models.status import TaskStatus
from workflows.payload import NAME, TYPE, HttpStage, LlmStage, PythonStage, Stage, Workflow
from workflows.templates import count_names

MOST_OUTPUT: Final = 16_384  # characters of an output that is read without being asked for

# steps: what is stored of each stage. A long output is cut, unless it is that of the stage `whole`.
STEPS: Final = sql("""
    SELECT name, created_at, result - 'output', length(output),
           CASE WHEN name = :whole THEN output ELSE left(output, :most) END
    FROM (SELECT name, created_at, result, (result -> 'output')::text AS output FROM ledger.task_step
          WHERE task_id = :id AND jsonb_typeof(result) = 'object' AND result ? 'output') AS step
""")
# latest: the latest changes of workflows, among the newest :window tasks that wait, among as many that have ended, and
# among all that run or are dead. So a ledger with millions of other tasks is not searched.
LATEST: Final = sql("""
    WITH waiting AS MATERIALIZED (
        SELECT id, type, updated_at AS changed_at FROM ledger.ingest_task WHERE status IN ('QUEUED', 'RETRYING')
        ORDER BY updated_at DESC LIMIT :window),
    ended AS MATERIALIZED (
        SELECT id, type, finished_at AS changed_at FROM ledger.ingest_task WHERE status IN ('SUCCEEDED', 'DISCARDED')
        ORDER BY finished_at DESC LIMIT :window),
    found AS MATERIALIZED (
        SELECT id FROM (
            SELECT id, changed_at FROM waiting WHERE type = :type
            UNION ALL SELECT id, changed_at FROM ended WHERE type = :type
            UNION ALL (SELECT id, finished_at FROM ledger.ingest_task WHERE status = 'DEAD' AND type = :type
                       ORDER BY finished_at DESC LIMIT :limit)
            UNION ALL SELECT id, updated_at FROM ledger.ingest_task
                      WHERE status = 'RUNNING' AND type = :type
                        AND id IN (SELECT unnest(task_ids) FROM ledger.task_lease WHERE type = :type)) AS any_status
        ORDER BY changed_at DESC, id DESC LIMIT :limit)
    SELECT id, attempt_count, coalesce(finished_at, updated_at), created_at, finished_at,
           left(payload ->> 'workflowId', 200), status, jsonb_path_query_array(payload, 'lax $.stages[0 to 49].name'),
           ARRAY(SELECT name FROM ledger.task_step WHERE task_id = id)
    FROM found JOIN ledger.ingest_task USING (id) ORDER BY coalesce(finished_at, updated_at) DESC, id DESC
""")
WINDOW: Final = 20_000


class StageState(StrEnum):
    """How far a stage is."""

    DONE = "done"
    RUNNING = "running"
    NEXT = "next"
    FAILED = "failed"
    RETRYING = "retrying"
    WAITING = "waiting"
    ENDED = "not run"


# The state of the first stage that is not done, and of those after it.
_UNFINISHED: Final = {
    TaskStatus.QUEUED: (StageState.NEXT, StageState.WAITING),
    TaskStatus.RUNNING: (StageState.RUNNING, StageState.WAITING),
    TaskStatus.RETRYING: (StageState.RETRYING, StageState.WAITING),
    TaskStatus.DEAD: (StageState.FAILED, StageState.WAITING),
    TaskStatus.SUCCEEDED: (StageState.ENDED, StageState.ENDED),
    TaskStatus.DISCARDED: (StageState.ENDED, StageState.ENDED),
}
_CURRENT: Final = (StageState.NEXT, StageState.RUNNING, StageState.RETRYING, StageState.FAILED)


@dataclass(frozen=True, slots=True)
class DoneStage:
    """What the ledger keeps of a finished stage."""

    finished_at: datetime
    notes: dict[str, Any]  # kind, seconds, attempt, and what its kind adds
    length: int  # of the output as JSON, in characters
    written: str  # the output as JSON, or the beginning of it

    @property
    def is_cut(self) -> bool:
        return len(self.written) < self.length

    @property
    def seconds(self) -> float | None:
        seconds = self.notes.get("seconds")
        return seconds if isinstance(seconds, int | float) else None

    @property
    def attempt(self) -> int:
        """Return the attempt of the task in which the stage finished."""
        attempt = self.notes.get("attempt")
        return attempt if isinstance(attempt, int) else 1

    @property
    def more(self) -> list[str]:
        """Return what the kind of the stage notes, such as `httpStatus 200`."""
        known = ("kind", "seconds", "attempt")
        return [f"{name} {json.dumps(value)}" for name, value in self.notes.items() if name not in known]

    @property
    def output(self) -> Any:
        """Return the output; of one that is cut, the beginning as text."""
        return self.written if self.is_cut else json.loads(self.written)


@dataclass(frozen=True, slots=True)
class StageProgress:
    """A stage, and how far it is."""

    stage: Stage
    state: StageState
    done: DoneStage | None

    @property
    def name(self) -> str:
        return self.stage.name

    @property
    def target(self) -> str:
        """Return the name of what it calls: a function, a destination or a model."""
        match self.stage:
            case PythonStage():
                return self.stage.function
            case HttpStage():
                return self.stage.destination
            case LlmStage():
                return self.stage.model

    @property
    def uses(self) -> list[str]:
        """Return the names in its templates: `input`, and earlier stages."""
        return sorted(count_names(self.stage.templates()))


@dataclass(frozen=True, slots=True)
class ListedWorkflow:
    """The task of a workflow, without payload and outputs."""

    task_id: uuid.UUID
    attempt_count: int
    changed_at: datetime
    created_at: datetime
    finished_at: datetime | None
    workflow_id: str | None
    status: str
    stages: list[Any]  # the names in the payload, which may be anything
    stored: list[str]  # the names of the steps

    @property
    def states(self) -> list[tuple[str, StageState]]:
        """Return the names of the stages with their states; nothing if the payload is not a workflow."""
        is_workflow = all(isinstance(name, str) and NAME.fullmatch(name) for name in self.stages)
        return _states(self.stages if is_workflow else [], TaskStatus(self.status), self.stored)

    @property
    def done(self) -> int:
        return sum(state is StageState.DONE for _, state in self.states)

    @property
    def current(self) -> tuple[str, StageState] | None:
        """Return the stage that runs, has failed or comes next."""
        return next((each for each in self.states if each[1] in _CURRENT), None)


def read_done(connection: Connection, task_id: uuid.UUID, *, whole: str = "") -> dict[str, DoneStage]:
    """Return what is stored of the finished stages, by their names. The output of the stage `whole` is not cut."""
    rows = connection.execute(STEPS, {"id": task_id, "whole": whole, "most": MOST_OUTPUT})
    return {name: DoneStage(*row) for name, *row in rows}


def progress(workflow: Workflow, status: TaskStatus, done: Mapping[str, DoneStage]) -> list[StageProgress]:
    """Return how far each stage is."""
    states = _states([stage.name for stage in workflow.stages], status, done)
    return [
        StageProgress(stage, state, done.get(stage.name))
        for stage, (_, state) in zip(workflow.stages, states, strict=True)
    ]


def latest(connection: Connection, *, limit: int) -> list[ListedWorkflow]:
    """Return the workflows that have changed last, among the latest changes of all tasks."""
    rows = connection.execute(LATEST, {"type": TYPE, "limit": limit, "window": WINDOW})
    return [ListedWorkflow(*row) for row in rows]


def _states(names: list[str], status: TaskStatus, done: Container[str]) -> list[tuple[str, StageState]]:
    first, later = _UNFINISHED[status]
    states = []
    for name in names:
        if name in done:
            states.append((name, StageState.DONE))
        else:
            states.append((name, first))
            first = later
    return states
