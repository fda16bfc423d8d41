"""A COMMIT whose answer was lost is written again under the same token, and changes nothing if it took effect."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from tasks.core.outcomes import Dead
from tasks.core.task import Task
from tasks.execution.deliver import deliver
from tests.tasks.deliveries import are_well, audits, handled, inserting, leases, submitted, take_away, watching
from tests.tasks.ledger_line import Line
from tests.tasks.work import OnPurpose, effects, rows, task, transitions

pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")


@pytest.mark.parametrize("count", [1, 3])
def test_a_commit_whose_answer_was_lost_is_never_run_again(count: int, line: Line, through_the_line: Engine) -> None:
    ids = inserting({0: lambda *_: line.cut_at("COMMIT", but_it_arrives=True)}, count)
    deliver(through_the_line, ids)
    are_well(ids)
    assert audits() == []
    deliver(through_the_line, ids)
    are_well(ids)


def test_a_last_failure_whose_commit_had_no_answer_is_announced_as_dead(
    line: Line, through_the_line: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced: list[Any] = []
    monkeypatch.setattr("tasks.execution.claim.announce", lambda settled, *_: announced.extend(settled.values()))

    def fail(_task: Task) -> None:
        line.cut_at("COMMIT", but_it_arrives=True)
        raise OnPurpose

    with handled("test.last", fail, transactional=False, max_attempts=1):
        (id_,) = submitted(1, "test.last")
        deliver(through_the_line, [id_])
    assert (task(id_)["status"], [type(outcome) for outcome in announced]) == ("DEAD", [Dead])


@pytest.mark.parametrize("count", [1, 3])
def test_a_commit_that_never_arrived_leaves_no_effect(count: int, line: Line, through_the_line: Engine) -> None:
    ids = inserting({0: lambda *_: line.cut_at("COMMIT", but_it_arrives=False)}, count)
    deliver(through_the_line, ids)
    assert rows("status, attempt_count, isolated") == [("QUEUED", 0, False)] * count
    assert (effects(), leases(), audits()) == ({}, 0, [])


@pytest.mark.parametrize("arrives", [True, False])
def test_a_failure_is_charged_once_although_the_answer_to_its_settling_was_lost(
    arrives: bool, line: Line, through_the_line: Engine
) -> None:
    def fail(_task: Task, _db: Session) -> None:
        line.cut_at("COMMIT", but_it_arrives=arrives)  # the next COMMIT is that of the settling
        raise OnPurpose("on purpose")

    (id_,) = inserting({0: fail}, 1)
    deliver(through_the_line, [id_])
    assert rows("status, attempt_count, error_code") == [("RETRYING", 1, "handler_error")]
    assert [to for _, to in transitions(id_)] == ["QUEUED", "RUNNING", "RETRYING"]
    assert (leases(), audits()) == (0, [])


@pytest.mark.parametrize("arrives", [True, False])
def test_an_effect_outside_the_ledger_is_settled_although_the_connection_was_lost(
    arrives: bool, line: Line, through_the_line: Engine
) -> None:
    """The handler has had its effect, so a lost connection must not make it run again."""
    with handled("test.elsewhere", lambda _task: line.cut_at("COMMIT", but_it_arrives=arrives), transactional=False):
        (id_,) = submitted(1, "test.elsewhere")
        deliver(through_the_line, [id_])
    assert rows() == [("SUCCEEDED", 0)]
    assert (leases(), audits()) == (0, [])


def test_a_task_lost_while_it_was_settled_blocks_the_rest_of_its_key(line: Line, through_the_line: Engine) -> None:
    ran: list[int] = []

    def lose_the_first(each: Task) -> None:
        ran.append(each.payload)
        line.cut_at("COMMIT", but_it_arrives=False)

    def take_away_both(_context: Any) -> None:
        for id_ in ids:
            take_away(id_)

    with handled("test.elsewhere", lose_the_first, transactional=False):
        ids = submitted(2, "test.elsewhere", lambda n: n, partition_key="k")
        with watching(through_the_line, "handle_error", take_away_both):
            deliver(through_the_line, ids)
    assert ran == [0]
