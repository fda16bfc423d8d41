"""requeue-dead, discard-dead, retry-now: nothing happens unasked, nothing twice, and a stop says how far it got."""

from __future__ import annotations

import os
import pty
import signal
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import typer
from celery import Celery

from commands import rate
from commands.confirmation import operator
from models.engine import engine
from models.sql import sql
from outbox.after_commit_publisher import submitter
from tasks import broker, ticks
from tasks.core.registry import handlers
from tasks.execution import claim
from tasks.execution.deliver import ingest
from tests.outbox.ledger import insert, move, woken
from tests.servers import ServersOfTests, wait_until
from tests.tasks import work
from tests.tasks.door import DIES, Done, buried, change, dead, manage, started, statuses, submitted

DLQ = "ingest.dlq"


@contextmanager
def worker() -> Iterator[None]:
    """Runs what is due, as a worker would, until the end of the block."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(0.01):
            ingest(engine(), [id_ for (id_,) in work.rows("id", "status = 'QUEUED'")])

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_without_a_filter_and_a_terminal_nothing_is_done_and_the_line_for_all_is_printed(stack: ServersOfTests) -> None:
    tasks = buried(2)
    for command in ("requeue-dead", "discard-dead"):
        for options in ([], ["--json"]):
            refused = manage(command, *options)
            assert refused.code == 2
            assert f"manage.py {command} --all" in refused.err
    assert "handler_error" in manage("requeue-dead").out
    assert statuses(tasks) == ["DEAD", "DEAD"]
    assert manage("requeue-dead", "--all").code == 0
    assert statuses(tasks) == ["QUEUED", "QUEUED"]


def answered(answer: bytes, *arguments: str) -> Done:
    """By somebody who sits at a terminal; what is printed goes into files."""
    ours, theirs = pty.openpty()
    os.write(ours, answer)
    with started(*arguments, stdin=theirs) as asked:
        out, err = asked.communicate(timeout=60)
    os.close(ours)
    os.close(theirs)
    return Done(asked.returncode, out, err)


def test_on_a_terminal_it_is_asked_first(stack: ServersOfTests) -> None:
    tasks = buried(2)
    asked = answered(b"n\n", "discard-dead")
    assert asked.code == 1
    assert "Discard 2 tasks?" in asked.out
    assert statuses(tasks) == ["DEAD", "DEAD"]


def test_beside_json_what_is_chosen_and_the_question_are_on_stderr(stack: ServersOfTests) -> None:
    tasks = buried(2)
    asked = answered(b"n\n", "discard-dead", "--json")
    assert (asked.code, asked.out) == (1, "")
    assert "handler_error" in asked.err
    assert "chosen: 2" in asked.err
    assert "Discard 2 tasks?" in asked.err
    assert statuses(tasks) == ["DEAD", "DEAD"]
    asked = answered(b"y\n", "requeue-dead", "--json")
    assert (asked.code, asked.json["done"], asked.out[0]) == (0, 2, "{")
    assert "Requeue 2 tasks?" in asked.err
    insert("hook", 2, status="DEAD", last_error="refused")
    asked = answered(b"y\n", "outbox", "discard-dead", "--json")
    assert (asked.json, asked.out[0]) == ({"done": 2}, "{")
    assert "refused" in asked.err
    assert "Discard 2 events?" in asked.err


def test_a_dry_run_counts_by_type_and_error_and_changes_nothing(stack: ServersOfTests) -> None:
    tasks = [*buried(2), *buried(1, error_code="worker_lost", error_message="[red]gone\x9b31m")]
    said = manage("requeue-dead", "--dry-run", "--json").json
    assert (said["total"], said["dryRun"]) == (3, True)
    assert [(each["errorCode"], each["count"]) for each in said["groups"]] == [("handler_error", 2), ("worker_lost", 1)]
    assert "[red]gone 31m" in manage("discard-dead", "--error-code", "worker_lost", "--dry-run").out
    assert Counter(statuses(tasks)) == {"DEAD": 3}


def test_a_dry_run_with_a_limit_counts_only_what_would_be_taken(stack: ServersOfTests) -> None:
    buried(12)
    longest_dead = buried(2, error_code="worker_lost")
    change(longest_dead, "finished_at = finished_at - interval '1 hour'")
    for command in ("requeue-dead", "discard-dead"):
        said = manage(command, "--limit", 3, "--dry-run", "--json").json
        groups = {each["errorCode"]: each["count"] for each in said["groups"]}
        assert (said["total"], groups) == (3, {"worker_lost": 2, "handler_error": 1})
    table, chosen = manage("requeue-dead", "--limit", 3, "--dry-run").out.rsplit("chosen: ")
    assert chosen == "3\n"
    assert "12" not in table
    assert manage("requeue-dead", "--limit", 3, "--all", "--json").json["done"] == 3
    assert Counter(work.rows("error_code", "status = 'QUEUED'")) == {("worker_lost",): 2, ("handler_error",): 1}


@pytest.mark.parametrize(
    "options",
    [["--id", "17"], ["--rate", "fast"], ["--rate", "0/s"], ["--since", "yesterday"], ["--limit", "0"]],
    ids=" ".join,
)
def test_what_cannot_be_understood_changes_nothing(stack: ServersOfTests, options: list[str]) -> None:
    (task,) = buried(1)
    assert manage("requeue-dead", "--all", *options).code == 2
    assert statuses([task]) == ["DEAD"]


def test_who_did_it_and_why_is_in_the_history(stack: ServersOfTests) -> None:
    first, second = dead(DIES, DIES)
    assert manage("requeue-dead", "--id", first, "--reason", "mended", "--json").json["done"] == 1
    assert manage("discard-dead", "--id", second, "--reason", "cancelled", "--json").json["done"] == 1
    assert work.transitions(first, "to_status, message, actor")[-1] == ("QUEUED", "mended", operator())
    assert work.transitions(second, "to_status, message, actor")[-1] == ("DISCARDED", "cancelled", operator())
    assert manage("requeue-dead", "--id", first, "--json").json == {"done": 0, "total": 0}


def test_the_longest_dead_come_first_and_never_more_than_the_limit(stack: ServersOfTests) -> None:
    tasks = buried(5)
    assert (
        manage("requeue-dead", "--type", "demo.flaky", "--limit", 3, "--rate", "1000000/s", "--json").json["done"] == 3
    )
    assert manage("discard-dead", "--until", "0s", "--json").json["done"] == 2
    assert Counter(statuses(tasks)) == {"QUEUED": 3, "DISCARDED": 2}


def test_the_queue_of_dead_letters_follows(stack: ServersOfTests) -> None:
    stays, goes = dead(DIES, DIES)
    ticks.run("relay")
    assert sorted(map(str, woken(stack, DLQ))) == sorted(map(str, [stays, goes]))
    assert manage("requeue-dead", "--id", goes, "--json").json["letters"] == 1
    ticks.run("relay")
    assert list(map(str, woken(stack, DLQ))) == [str(stays)]


def test_a_broker_that_is_away_is_a_warning(stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> None:
    (task,) = dead()
    monkeypatch.setattr(broker, "app", Celery(broker="redis://127.0.0.1:1/0", set_as_current=False))
    done = manage("requeue-dead", "--id", task, "--json")
    assert done.code == 0
    assert done.json == {"done": 1, "total": 1, "letters": None}
    assert "not up to date yet" in done.err


def test_the_others_follow_when_the_canaries_succeed(stack: ServersOfTests) -> None:
    tasks = buried(5)
    with worker():
        done = manage("requeue-dead", "--all", "--canary", 2, "--json")
    assert done.code == 0
    assert (done.json["done"], done.json["canary"]) == (5, {"SUCCEEDED": 2})
    assert "DEAD" not in statuses(tasks)


def test_the_others_stay_dead_when_a_canary_dies(stack: ServersOfTests) -> None:
    tasks = [*buried(1), *dead(DIES), *buried(3)]
    with worker():
        done = manage("requeue-dead", "--all", "--canary", 2)
    assert done.code == 1
    assert "Not all canaries succeeded: 1 DEAD, 1 SUCCEEDED. 3 others were left as they are." in done.err
    assert statuses(tasks[2:]) == ["DEAD"] * 3


def test_canaries_that_nobody_runs_are_not_waited_for_for_ever(stack: ServersOfTests) -> None:
    tasks = buried(3)
    done = manage("requeue-dead", "--all", "--canary", 1, "--canary-timeout", 0)
    assert done.code == 1
    assert "1 QUEUED" in done.err
    assert Counter(statuses(tasks)) == {"QUEUED": 1, "DEAD": 2}


def test_ctrl_c_stops_between_two_batches_and_says_how_far_it_got(stack: ServersOfTests) -> None:
    tasks = buried(5)
    with started("requeue-dead", "--all", "--rate", "1/h") as running:
        wait_until(lambda: "QUEUED" in statuses(tasks), "the first is requeued")
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    assert running.returncode == 130, err
    assert "requeued: 1 of 5" in out
    assert "4 were left as they are. It is safe to run it again." in err
    assert Counter(statuses(tasks)) == {"QUEUED": 1, "DEAD": 4}
    assert manage("requeue-dead", "--all", "--json").json["done"] == 4


@contextmanager
def refused_by_the_database(task: uuid.UUID) -> Iterator[None]:
    with engine().begin() as connection:
        connection.execute(
            sql("""
            CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''no''; END'""")
        )
        connection.execute(
            sql(f"""
            CREATE TRIGGER refuse BEFORE UPDATE ON ledger.ingest_task FOR EACH ROW WHEN (OLD.id = '{task}')
            EXECUTE FUNCTION refuse()""")
        )
    try:
        yield
    finally:
        with engine().begin() as connection:
            connection.execute(sql("DROP FUNCTION refuse CASCADE"))


def test_a_failure_half_way_says_how_far_it_got(stack: ServersOfTests) -> None:
    first, second, third = dead(DIES)[0], dead(DIES)[0], dead(DIES)[0]
    with refused_by_the_database(second):
        done = manage("requeue-dead", "--all", "--rate", "9/s")
    assert done.code == 1
    assert "Stopped: requeued 1 of 3. It is safe to run it again." in done.err
    assert statuses([first, second, third]) == ["QUEUED", "DEAD", "DEAD"]


@pytest.mark.parametrize(("given", "per_second"), [("50/s", 50), ("30/m", 0.5), ("7", 7), ("7200/h", 2), (None, None)])
def test_a_rate_is_so_many_per_second(given: str | None, per_second: float | None) -> None:
    assert rate.rate(given) == per_second


def test_a_second_sees_several_small_batches() -> None:
    assert [rate.smooth_batch(per_second, 500) for per_second in (None, 0.5, 10, 1000, 10**6)] == [500, 1, 2, 200, 500]
    with pytest.raises(typer.BadParameter):
        rate.rate("-1/s")


# retry-now


def test_a_task_that_waits_for_its_next_attempt_is_due_now_and_nothing_is_charged(stack: ServersOfTests) -> None:
    (task,) = submitted({"fail": 1})
    ingest(engine(), [task])
    before = work.task(task)
    assert manage("retry-now", task, "--reason", "mended", "--json").json == {"taskId": str(task), "was": "RETRYING"}
    row = work.task(task)
    assert (row["status"], row["attempt_count"]) == ("RETRYING", before["attempt_count"])
    assert row["next_retry_at"] < before["next_retry_at"]
    assert (work.wakeups()[-1].ids, work.wakeups()[-1].due_at) == ([task], None)
    with engine().connect() as connection:
        ((code, who, detail),) = connection.execute(sql("SELECT code, worker_id, detail FROM ledger.task_audit")).all()
    assert (code, who) == ("retry_now", operator())
    assert detail.startswith("mended; was due at ")
    ingest(engine(), [task])
    assert statuses([task]) == ["SUCCEEDED"]


def test_a_task_that_was_scheduled_for_later_runs_now_and_its_old_wakeup_finds_nothing_to_do(
    stack: ServersOfTests,
) -> None:
    (task,) = submitted({}, run_at=timedelta(hours=1))
    assert manage("retry-now", task).code == 0
    assert submitter().flush(60)
    assert [str(task)] in woken(stack)
    ingest(engine(), [task])
    move(stack, 3601)
    ticks.run("relay")
    ingest(engine(), [task])
    assert work.transitions(task) == [(None, "QUEUED"), ("QUEUED", "RUNNING"), ("RUNNING", "SUCCEEDED")]


def test_a_dead_task_is_requeued_by_retry_now(stack: ServersOfTests) -> None:
    (task,) = dead()
    assert "was DEAD and is due now" in manage("retry-now", task).out
    assert work.transitions(task, "to_status, actor")[-1] == ("QUEUED", operator())


def test_what_does_not_wait_cannot_be_hurried(stack: ServersOfTests) -> None:
    (done,) = submitted({})
    ingest(engine(), [done])
    (running,) = submitted({})
    with engine().connect() as connection:
        claim.claim(connection, [running], handlers=handlers(), holder="w", lease_seconds=60)
    for task, sentence in [(running, "is running"), (done, "is not run twice"), (uuid.UUID(int=1), "no task")]:
        refused = manage("retry-now", task)
        assert (refused.code, sentence in refused.err) == (1, True), refused
    assert manage("retry-now", "17").code == 2


def test_a_task_that_is_due_already_is_left_alone(stack: ServersOfTests) -> None:
    (task,) = submitted({})
    before = work.wakeups()
    refused = manage("retry-now", task)
    assert (refused.code, "due already" in refused.err) == (1, True)
    assert [wakeup.id for wakeup in work.wakeups()] == [wakeup.id for wakeup in before]
