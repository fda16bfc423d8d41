"""One message in one process: which tasks run, in how many statements, and what is released when time runs out."""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

import failpoint
import settings
from models.engine import engine
from tasks import Discard, Permanent, Snooze
from tasks.core.task import Task
from tasks.execution.deliver import UNHANDLED_SECONDS
from tasks.execution.heartbeat import Heartbeat, heartbeat
from tests.outbox.ledger import move
from tests.servers import ServersOfTests
from tests.tasks.deliveries import (
    are_well,
    at_commit,
    audits,
    change,
    claimed,
    counted,
    delivered,
    handled,
    inserting,
    leases,
    raising,
    run_claim,
    scalar,
    scripted,
    statements,
    submitted,
    take_away,
    timed,
)
from tests.tasks.work import OnPurpose, effects, rows, task, transitions, wakeups

OPEN_TRANSACTIONS = """
    SELECT count(*) FROM pg_stat_activity
    WHERE application_name = 'celeriac' AND xact_start IS NOT NULL AND pid <> pg_backend_pid()"""
pytestmark = pytest.mark.usefixtures("ledger", "known_handlers")


@pytest.fixture
def elsewhere() -> Iterator[list[Any]]:
    """Return the payloads that the handler "test.elsewhere" has seen; it runs outside a transaction."""
    done: list[Any] = []

    def do(each: Task) -> Any:
        done.append(each.payload)
        if isinstance(each.payload, dict):
            raise {"snooze": Snooze(60), "discard": Discard("no"), "permanent": Permanent("no"), "fail": OnPurpose()}[
                each.payload["raise"]
            ]
        return {"did": each.payload}

    with handled("test.elsewhere", do, transactional=False):
        yield done


def run_late(ids: list[uuid.UUID], **changes: Any) -> None:
    """Run a batch that finds half of its lease over from the start."""
    claim = claimed(ids)
    claim.lease.deadline = time.monotonic()
    run_claim(claim, **changes)


def test_a_task_that_succeeds_has_its_result_its_effect_and_three_transitions() -> None:
    def script(each: Task, _db: Session) -> Any:
        return {"n": each.payload["n"], "a": [1, None, "é\U0001f600"]}

    (id_,) = scripted(script)
    delivered([id_])
    found = task(id_)
    assert (found["status"], found["result"]) == ("SUCCEEDED", {"n": 0, "a": [1, None, "é\U0001f600"]})
    assert (found["lease_token"], found["next_retry_at"], found["last_error"]) == (None, None, None)
    assert found["finished_at"] == found["updated_at"] > found["created_at"]
    assert [to for _, to in transitions(id_)] == ["QUEUED", "RUNNING", "SUCCEEDED"]


def test_a_handler_sees_its_task_as_it_was_submitted() -> None:
    seen: list[Task] = []
    (id_,) = scripted(lambda each, _: seen.append(each), key="k", priority=7, context={"traceId": "t"}, max_attempts=4)
    delivered([id_])
    (one,) = seen
    assert (one.id, one.type, one.key, one.priority, one.queue) == (id_, "test.scripted", "k", 7, "ingest")
    assert (one.attempt_count, one.max_attempts, one.context, one.due_at) == (0, 4, {"traceId": "t"}, None)


@pytest.mark.parametrize("size", [1, 10, 100])
def test_a_batch_of_any_size_takes_three_statements_besides_the_handlers_own(size: int) -> None:
    ids = submitted(size)
    commits: list[Any] = []
    with statements() as sent, at_commit(engine(), commits.append):
        delivered(ids)
    own = [one for one in sent if one.startswith("INSERT INTO public.test_sink")]
    ours = [one.partition(" ")[0] for one in sent if one not in own]
    assert len(own) == size
    assert ours == ["EXECUTE", "DECLARE", "CLOSE"]  # claim, guard against a commit by the handler, settle
    assert len(commits) == 1  # the claim is sent in autocommit mode
    are_well(ids)


@pytest.mark.parametrize("size", [1, 10, 50])
def test_a_batch_handler_takes_four_statements_for_any_size(size: int) -> None:
    ids = submitted(size, "test.many")
    with statements() as sent:
        delivered(ids)
    assert len(sent) == 4
    are_well(ids)


@pytest.mark.parametrize(("culprit", "parts"), [(0, [9]), (4, [4, 5]), (8, [8, 1]), (9, [9])])
def test_the_tasks_before_and_behind_one_that_fails_share_transactions(culprit: int, parts: list[int]) -> None:
    ids = inserting({culprit: raising(OnPurpose())}, 10)
    commits: list[Any] = []
    with statements() as sent, at_commit(engine(), commits.append):
        delivered(ids)
    own = [one for one in sent if one.startswith("INSERT INTO public.test_sink")]
    assert len(own) == culprit + 1 + sum(parts)
    # claim; guard of the part that broke, settling its culprit, reading the tasks before it again; guard, settle
    assert len(sent) - len(own) == 1 + 2 + (culprit > 0) + 2 * len(parts)
    assert len(commits) == 1 + len(parts)  # of the culprit, and of each part
    are_well(ids, culprit)


def test_a_batch_in_which_many_tasks_fail_runs_each_of_the_others_at_most_twice() -> None:
    ids = inserting(dict.fromkeys(range(3, 40, 6), raising(OnPurpose())), 40)
    bad = ids[3::6]
    with statements() as sent:
        delivered(ids)
    own = [one for one in sent if one.startswith("INSERT INTO public.test_sink")]
    assert len(own) <= 2 * len(ids)
    assert effects() == {id_: 1 for id_ in ids if id_ not in bad}
    assert [(task(id_)["status"], task(id_)["attempt_count"]) for id_ in bad] == [("RETRYING", 1)] * len(bad)
    assert leases() == 0


def test_a_task_that_fails_only_when_it_runs_again_is_charged_and_its_neighbours_succeed() -> None:
    runs: Counter[int] = Counter()

    def fail_the_second_time(each: Task, _db: Session) -> None:
        n = each.payload["n"]
        runs[n] += 1
        if n == 5 or (n == 2 and runs[n] == 2):
            raise OnPurpose

    ids = inserting(dict.fromkeys(range(8), fail_the_second_time), 8)
    delivered(ids)
    assert {ids.index(id_) for id_ in effects()} == {0, 1, 3, 4, 6, 7}
    assert [task(ids[n])["attempt_count"] for n in (2, 5)] == [1, 1]
    assert leases() == 0


def test_a_batch_starts_no_task_after_half_its_lease_and_releases_the_rest() -> None:
    """Finished tasks are settled; the others are woken again and not charged."""
    ids = inserting({}, 5)
    before = counted()
    run_late(ids)
    (done,) = effects()
    assert rows("status, attempt_count", f"id = '{done}'") == [("SUCCEEDED", 0)]
    rest = set(ids) - {done}
    assert set(rows("status, attempt_count, isolated", f"id <> '{done}'")) == {("QUEUED", 0, False)}
    assert set(wakeups()[-1].ids) == rest
    assert {transitions(id_, "message")[-1][0] for id_ in rest} == {"there was no time to start it"}
    assert counted() - before == {"succeeded": 1, "released": 4}
    assert leases() == 0
    delivered(list(rest))
    assert effects() == dict.fromkeys(ids, 1)


def test_after_half_its_lease_a_failed_batch_does_not_run_one_by_one() -> None:
    ids = inserting({0: raising(OnPurpose())}, 4)
    run_late(ids)
    assert sorted(rows()) == [("QUEUED", 0), ("QUEUED", 0), ("QUEUED", 0), ("RETRYING", 1)]
    assert (effects(), leases()) == ({}, 0)


def test_tasks_of_a_batch_handler_that_failed_after_half_its_lease_run_alone_next_time() -> None:
    """The culprit is unknown; released as they were, they would fail together again and again."""

    def one_is_bad(tasks: Sequence[Task], _db: Session) -> None:
        if any(each.payload == 0 for each in tasks):
            raise OnPurpose

    with handled("test.one.is.bad", one_is_bad, many=True):
        ids = submitted(3, "test.one.is.bad", lambda n: n)
        run_late(ids)
        assert rows("status, attempt_count, isolated") == [("RETRYING", 0, True)] * 3
        delivered(ids)
    assert rows() == [("RETRYING", 1), ("SUCCEEDED", 0), ("SUCCEEDED", 0)]
    assert leases() == 0


@pytest.mark.parametrize("code", ["22012", "40001"], ids=["broken", "repeated"])
def test_a_task_that_runs_again_after_a_rollback_has_its_submitted_values(code: str) -> None:
    """A handler may change the task object, and another task of the batch may cause the rollback."""
    failed: list[int] = []

    def change_it(each: Task, db: Session) -> None:
        each.context = {**each.context, "seen": True, "before": "seen" in each.context}
        n = each.payload.pop("n")
        each.payload = "gone"
        if n == 1 and not failed:
            failed.append(n)
            db.execute(text(f"DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '{code}'; END $$"))
        assert not each.context["before"]

    ids = scripted(change_it, 3, context={"user": "ada"})
    delivered(ids)
    assert [task(id_)["status"] for id_ in ids if id_ != ids[1]] == ["SUCCEEDED", "SUCCEEDED"]


def test_a_single_task_and_a_batch_handler_are_started_however_late_it_is() -> None:
    """Right after a claim at least one task must start; otherwise no task ever would."""
    run_late(submitted(1))
    run_late(submitted(5, "test.many"))
    assert set(rows("status")) == {("SUCCEEDED",)}


def test_every_outcome_has_its_own_counter_and_timer() -> None:
    does = {
        1: raising(OnPurpose()),
        2: raising(Permanent("no")),
        3: raising(Snooze(1)),
        4: raising(Discard("no")),
    }
    ids = inserting(does, 5)
    last = inserting({0: raising(OnPurpose())}, 1, max_attempts=1)
    before, before_timed = counted(), timed()
    delivered([*ids, *last])
    delivered(ids[:1])
    expected = {"succeeded": 1, "retry": 1, "dead": 2, "snoozed": 1, "discarded": 1}
    assert counted() - before == {**expected, "skipped": 1}
    assert timed() - before_timed == expected


def test_a_non_transactional_handler_runs_without_an_open_transaction(elsewhere: list[Any]) -> None:
    ids = submitted(3, "test.elsewhere", lambda n: n)
    open_ones: list[int] = []
    with handled("test.look", lambda _: open_ones.append(scalar(OPEN_TRANSACTIONS)), transactional=False):
        delivered(submitted(2, "test.look"))
    assert open_ones == [0, 0]
    delivered(ids)
    assert elsewhere == [0, 1, 2]
    assert rows("status, result", "type = 'test.elsewhere'") == [("SUCCEEDED", {"did": n}) for n in range(3)]
    assert leases() == 0


def test_the_task_that_has_waited_longest_runs_first(stack: ServersOfTests, elsewhere: list[Any]) -> None:
    ids = submitted(3, "test.elsewhere", lambda n: n)
    change(ids[2], "updated_at = updated_at - interval '1 minute'")
    change(ids[0], "next_retry_at = updated_at + interval '1 microsecond'")
    move(stack, 1)
    delivered(ids)
    assert elsewhere == [2, 1, 0]


def test_each_task_of_a_non_transactional_handler_has_its_own_outcome(elsewhere: list[Any]) -> None:
    payloads = [0, {"raise": "fail"}, {"raise": "snooze"}, {"raise": "discard"}, {"raise": "permanent"}, 5]
    delivered(submitted(6, "test.elsewhere", payloads.__getitem__))
    assert rows() == [
        ("SUCCEEDED", 0), ("RETRYING", 1), ("RETRYING", 0), ("DISCARDED", 0), ("DEAD", 1), ("SUCCEEDED", 0),
    ]  # fmt: skip
    assert elsewhere == payloads, "each task runs once: there is no rollback"
    assert leases() == 0


def test_an_effect_outside_the_ledger_under_a_lost_lease_is_audited() -> None:
    with handled("test.lost", lambda each: [take_away(each.id), None][1], transactional=False):
        ids = submitted(2, "test.lost")
        delivered(ids)
    assert sorted(audits()) == sorted((id_, "late_success") for id_ in ids)
    assert rows("status") == [("RUNNING",)] * 2
    assert leases() == 0


def test_a_non_transactional_handler_is_not_started_after_half_its_lease(elsewhere: list[Any]) -> None:
    ids = submitted(3, "test.elsewhere")
    run_late(ids)
    assert (rows(), elsewhere) == ([("QUEUED", 0)] * 3, [])
    run_late(ids[:1])


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("place", ["ingest.after_effect", "ingest.after_settle"])
def test_an_internal_error_is_raised_and_leaves_no_task_running(place: str, count: int) -> None:
    ids = inserting({}, count)
    failpoint.arm(f"{place}=raise")
    with pytest.raises(failpoint.FailpointHit):
        delivered(ids)
    alone = count == 1
    undone = ("RETRYING", int(alone), not alone)
    expected = ("SUCCEEDED", 0, False) if place == "ingest.after_settle" else undone
    assert rows("status, attempt_count, isolated") == [expected] * count
    assert leases() == 0
    assert effects() == (dict.fromkeys(ids, 1) if place == "ingest.after_settle" else {})


def test_a_message_larger_than_a_batch_runs_in_several_batches() -> None:
    sizes: list[int] = []
    with handled("test.sizes", lambda tasks, _db: sizes.append(len(tasks)), many=True, batch=4):
        delivered(submitted(10, "test.sizes"))
    assert sizes == [4, 4, 2]


def test_a_task_without_a_handler_gets_one_later_wakeup_however_often_it_is_delivered(ledger: ServersOfTests) -> None:
    (id_,) = submitted(1)
    change(id_, "type = 'test.of_tomorrow'")
    for times in (1, 2):
        for _ in range(3):
            delivered([id_])
        assert len([wakeup for wakeup in wakeups() if wakeup.due_at]) == times
        move(ledger, UNHANDLED_SECONDS + 1)


def test_a_claim_made_by_hand_can_be_run_by_hand() -> None:
    ids = submitted(2)
    claim = claimed(ids)
    run_claim(claim)
    are_well(ids)


def test_a_batch_is_released_if_the_heartbeat_thread_cannot_start_and_the_next_one_tries_again(
    ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    fresh = Heartbeat(settings.current())
    monkeypatch.setattr(heartbeat, "made", fresh)
    ids = submitted(3)
    claim = claimed(ids)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            run_claim(claim)
    assert (rows(), leases()) == ([("RETRYING", 0)] * 3, 0)
    move(ledger, 2)
    delivered(ids)
    assert effects() == dict.fromkeys(ids, 1)
    assert fresh._thread is not None
    assert fresh._thread.is_alive()
    fresh.close()
