"""schedules: what operators see, pause, resume and run."""

from __future__ import annotations

import uuid

import pytest

from checks import workers
from checks.result import Level
from commands.confirmation import operator
from models.engine import engine
from models.sql import sql
from tasks.core.registered_types import LIVE_SECONDS
from tasks.submission.occurrences import submit_due
from tests.outbox.ledger import move
from tests.servers import ServersOfTests
from tests.tasks.command_line import manage
from tests.tasks.registrations import handler_of, registered
from tests.tasks.schedules import next_at, periods, renew, row, scheduled, set_clock
from tests.tasks.work import rows

pytestmark = pytest.mark.usefixtures("ledger")


def states() -> dict[str, str]:
    return {each["name"]: each["state"] for each in manage("schedules", "--json").json}


def test_schedules_are_listed_with_their_next_run_and_the_task_of_their_last_one(ledger: ServersOfTests) -> None:
    assert "No worker has declared a schedule yet" in manage("schedules").out
    set_clock(ledger, "2026-11-18 07:59:30")
    scheduled(timezone="Europe/Berlin", payload={"a": 1})
    move(ledger, 31)
    submit_due(engine())
    ((task_id,),) = rows("id")
    (found,) = manage("schedules", "list", "--json").json
    assert found == {
        "name": "test.hourly", "type": "test.hourly", "rule": "0 * * * *", "timezone": "Europe/Berlin",
        "catchUp": "once", "payload": {"a": 1}, "state": "active", "nextAt": "2026-11-18T09:00:00+00:00",
        "lastAt": "2026-11-18T08:00:00+00:00", "lastTaskId": str(task_id), "lastStatus": "QUEUED",
        "pausedBy": None, "pausedReason": None, "pausedAt": None, "error": None, "workers": ["another:1"],
    }  # fmt: skip
    line = manage("schedules").out.splitlines()[1]
    assert line.split("  ")[0] == "test.hourly"
    for part in ("0 * * * *", "Europe/Berlin", "active", "2026-11-18 09:00:00", "2026-11-18 08:00:00", str(task_id)):
        assert f"  {part}" in line
    assert [finding.level for finding in workers._check_schedules()] == [Level.OK]


def test_the_state_says_why_a_schedule_does_not_run(ledger: ServersOfTests) -> None:
    set_clock(ledger, "2026-11-18 07:59:30")
    scheduled("test.gone", name="gone:1")
    move(ledger, LIVE_SECONDS + 1)
    scheduled("test.active")
    scheduled("test.paused", name="another:2")
    scheduled("test.failing", queue="no-such-queue", name="another:3", schedule="* * * * *")
    scheduled("test.removed", name="another:4")
    registered(handler_of("test.removed"), name="another:5")
    manage("schedules", "pause", "test.paused", "--reason", "a \x1b[31mmove")
    move(ledger, 31)
    move(ledger, 31)
    with engine().begin() as connection:
        connection.execute(sql("UPDATE ledger.task_worker SET seen_at = ledger.ledger_now() WHERE worker <> 'gone:1'"))
    submit_due(engine())
    assert states() == {
        "test.active": "active", "test.failing": "failing", "test.gone": "no worker", "test.paused": "paused",
        "test.removed": "removed",
    }  # fmt: skip
    shown = manage("schedules").out
    assert "test.failing fails: UnknownQueue: There is no queue" in shown
    assert f"test.paused was paused by {operator()} at 2026-11-18 " in shown
    assert "UTC: a  [31mmove" in shown
    problems = {(finding.level, finding.message.partition(" ")[0]) for finding in workers._check_schedules()}
    assert problems == {(Level.FAIL, "test.failing"), (Level.WARN, "test.gone")}


def test_a_paused_schedule_skips_its_periods_until_it_is_resumed(ledger: ServersOfTests) -> None:
    set_clock(ledger, "2026-11-18 07:30:00")
    worker = scheduled(catch_up="all")
    assert manage("schedules", "pause", "test.hourly", "--reason", "a move", "--json").json["paused"]
    assert (row()["paused_by"], row()["paused_reason"]) == (operator(), "a move")
    assert "2026-11-18" not in manage("schedules").out.splitlines()[1], "a paused schedule has no next run"
    set_clock(ledger, "2026-11-18 09:30:00")
    renew(worker)
    assert submit_due(engine()).submitted == 0
    done = manage("schedules", "resume", "test.hourly", "--json")
    assert done.json == {"name": "test.hourly", "paused": False, "nextAt": "2026-11-18T10:00:00+00:00"}
    assert (submit_due(engine()).submitted, row()["paused_by"]) == (0, None)
    set_clock(ledger, "2026-11-18 10:00:30")
    renew(worker)
    submit_due(engine())
    assert periods() == ["2026-11-18T10:00:00Z"]


def test_resuming_what_is_not_paused_skips_nothing(ledger: ServersOfTests) -> None:
    set_clock(ledger, "2026-11-18 07:30:00")
    scheduled()
    set_clock(ledger, "2026-11-18 09:30:00")
    assert "next run: 2026-11-18 08:00:00 UTC" in manage("schedules", "resume", "test.hourly").out
    assert next_at() == "2026-11-18 08:00"


def test_a_run_by_hand_is_a_task_beside_the_periods(ledger: ServersOfTests) -> None:
    set_clock(ledger, "2026-11-18 07:59:30")
    scheduled(payload={"a": 1})
    manage("schedules", "pause", "test.hourly")
    first, second = (manage("schedules", "run", "test.hourly", "--json").json for _ in range(2))
    assert first["created"]
    assert uuid.UUID(first["taskId"]) != uuid.UUID(second["taskId"])
    assert rows("idempotency_key, payload->>'a', context") == [
        (None, "1", {"schedule": "test.hourly", "user": operator()})
    ] * 2  # fmt: skip
    manage("schedules", "resume", "test.hourly")
    move(ledger, 31)
    assert (submit_due(engine()).submitted, len(rows())) == (1, 3)


@pytest.mark.parametrize("command", ["pause", "resume", "run"])
def test_an_unknown_name_is_one_sentence(command: str) -> None:
    done = manage("schedules", command, "test.hurly")
    assert (done.code, done.out) == (1, "")
    assert done.err == "manage.py: There is no schedule 'test.hurly'. `manage.py schedules` lists the names.\n"
