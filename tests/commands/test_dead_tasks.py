"""requeue-dead, discard-dead, retry-now: no change without consent, none twice, and a stop reports how far it got."""

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

import settings
from commands import rate
from commands.confirmation import operator
from models.engine import engine
from models.sql import sql
from outbox.after_commit_publisher import after_commit_publisher
from outbox.dead_rows import batch_size
from tasks import broker, ticks
from tasks.core.registry import handlers
from tasks.execution import claim
from tasks.execution.deliver import deliver
from tests.outbox.ledger import insert, move, woken
from tests.servers import ServersOfTests, wait_until
from tests.tasks import work
from tests.tasks.command_line import DIES, Done, buried, change, dead, manage, started, statuses, submitted

DLQ = "ingest.dlq"


@contextmanager
def worker() -> Iterator[None]:
    """Run queued tasks, as a worker would, until the end of the block."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(0.01):
            deliver(engine(), [id_ for (id_,) in work.rows("id", "status = 'QUEUED'")])

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_nothing_changes_without_a_filter_and_without_a_terminal(stack: ServersOfTests) -> None:
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
    """Run a command whose stdin is a terminal, and answer its question."""
    ours, theirs = pty.openpty()
    os.write(ours, answer)
    with started(*arguments, stdin=theirs) as asked:
        out, err = asked.communicate(timeout=60)
    os.close(ours)
    os.close(theirs)
    return Done(asked.returncode, out, err)


def test_a_terminal_is_asked_before_anything_changes(stack: ServersOfTests) -> None:
    tasks = buried(2)
    asked = answered(b"n\n", "discard-dead")
    assert asked.code == 1
    assert "Discard 2 tasks?" in asked.out
    assert statuses(tasks) == ["DEAD", "DEAD"]


def test_with_json_the_table_and_the_question_go_to_stderr(stack: ServersOfTests) -> None:
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
    assert (asked.json, asked.out[0]) == ({"done": 2, "total": 2}, "{")
    assert "refused" in asked.err
    assert "Discard 2 events?" in asked.err


def test_a_dry_run_counts_by_type_and_error_and_changes_nothing(stack: ServersOfTests) -> None:
    tasks = [*buried(2), *buried(1, error_code="worker_lost", error_message="[red]gone\x9b31m")]
    said = manage("requeue-dead", "--dry-run", "--json").json
    assert (said["total"], said["dryRun"]) == (3, True)
    assert [(each["errorCode"], each["count"]) for each in said["groups"]] == [("handler_error", 2), ("worker_lost", 1)]
    assert "[red]gone 31m" in manage("discard-dead", "--error-code", "worker_lost", "--dry-run").out
    assert Counter(statuses(tasks)) == {"DEAD": 3}


def test_a_dry_run_with_a_limit_counts_only_the_tasks_it_would_change(stack: ServersOfTests) -> None:
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
    [
        ["--id", "17"],
        ["--rate", "fast"],
        ["--rate", "0/s"],
        ["--rate", "5"],
        ["--since", "yesterday"],
        ["--limit", "0"],
    ],
    ids=" ".join,
)
def test_an_invalid_option_changes_nothing(stack: ServersOfTests, options: list[str]) -> None:
    (task,) = buried(1)
    assert manage("requeue-dead", "--all", *options).code == 2
    assert statuses([task]) == ["DEAD"]


def test_the_history_names_the_operator_and_the_reason(stack: ServersOfTests) -> None:
    first, second = dead(DIES, DIES)
    assert manage("requeue-dead", "--id", first, "--reason", "mended", "--json").json["done"] == 1
    assert manage("discard-dead", "--id", second, "--reason", "cancelled", "--json").json["done"] == 1
    assert work.transitions(first, "to_status, message, actor")[-1] == ("QUEUED", "mended", operator())
    assert work.transitions(second, "to_status, message, actor")[-1] == ("DISCARDED", "cancelled", operator())
    assert manage("requeue-dead", "--id", first, "--json").json == {"done": 0, "total": 0}


def test_a_limit_is_never_exceeded(stack: ServersOfTests) -> None:
    tasks = buried(5)
    assert (
        manage("requeue-dead", "--type", "demo.flaky", "--limit", 3, "--rate", "1000000/s", "--json").json["done"] == 3
    )
    assert manage("discard-dead", "--until", "0s", "--json").json["done"] == 2
    assert Counter(statuses(tasks)) == {"QUEUED": 3, "DISCARDED": 2}


def test_a_requeue_removes_the_dead_letter(stack: ServersOfTests) -> None:
    stays, goes = dead(DIES, DIES)
    ticks.run("relay")
    assert sorted(map(str, woken(stack, DLQ))) == sorted(map(str, [stays, goes]))
    assert manage("requeue-dead", "--id", goes, "--json").json["letters"] == 1
    ticks.run("relay")
    assert list(map(str, woken(stack, DLQ))) == [str(stays)]


def test_an_unreachable_broker_is_only_a_warning(stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> None:
    (task,) = dead()
    monkeypatch.setattr(broker, "app", Celery(broker="redis://127.0.0.1:1/0", set_as_current=False))
    done = manage("requeue-dead", "--id", task, "--json")
    assert done.code == 0
    assert done.json == {"done": 1, "total": 1, "letters": None}
    assert "not up to date yet" in done.err


def test_the_others_are_requeued_when_the_canaries_succeed(stack: ServersOfTests) -> None:
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
    assert "Not all canaries succeeded (1 DEAD, 1 SUCCEEDED): 3 tasks left unchanged." in done.err
    assert statuses(tasks[2:]) == ["DEAD"] * 3


def test_waiting_for_canaries_ends_when_no_worker_runs_them(stack: ServersOfTests) -> None:
    tasks = buried(3)
    done = manage("requeue-dead", "--all", "--canary", 1, "--canary-timeout", 0)
    assert done.code == 1
    assert "1 QUEUED" in done.err
    assert Counter(statuses(tasks)) == {"QUEUED": 1, "DEAD": 2}


def test_ctrl_c_stops_between_two_batches_and_reports_how_far_it_got(stack: ServersOfTests) -> None:
    tasks = buried(5)
    with started("requeue-dead", "--all", "--rate", "1/h") as running:
        wait_until(lambda: "QUEUED" in statuses(tasks), "the first is requeued")
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    assert running.returncode == 130, err
    assert "requeued: 1 of 5" in out
    assert "4 tasks left unchanged. It is safe to run the command again." in err
    assert Counter(statuses(tasks)) == {"QUEUED": 1, "DEAD": 4}
    assert manage("requeue-dead", "--all", "--json").json["done"] == 4


@contextmanager
def refused_by_the_database(task: uuid.UUID) -> Iterator[None]:
    with engine().begin() as connection:
        connection.execute(
            sql("""
            CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''no''; END'""")
        )
        connection.execute(
            sql(f"""
            CREATE TRIGGER refuse BEFORE UPDATE ON ledger.ingest_task FOR EACH ROW WHEN (OLD.id = '{task}')
            EXECUTE FUNCTION public.refuse()""")
        )
    try:
        yield
    finally:
        with engine().begin() as connection:
            connection.execute(sql("DROP FUNCTION public.refuse CASCADE"))


def test_a_failure_half_way_reports_how_far_it_got(stack: ServersOfTests) -> None:
    first, second, third = dead(DIES)[0], dead(DIES)[0], dead(DIES)[0]
    with refused_by_the_database(second):
        done = manage("requeue-dead", "--all", "--rate", "9/s")
    assert done.code == 1
    assert "Stopped: requeued 1 of 3. It is safe to run the command again." in done.err
    assert statuses([first, second, third]) == ["QUEUED", "DEAD", "DEAD"]


@pytest.mark.parametrize(("given", "per_second"), [("50/s", 50), ("30/m", 0.5), ("7200/h", 2)])
def test_a_rate_is_converted_to_a_number_per_second(given: str, per_second: float) -> None:
    assert rate.parse_rate(given) == per_second


@pytest.mark.parametrize("given", ["5", "-1/s", "0/s", "5/d", "fast"])
def test_a_rate_without_a_number_and_a_unit_is_refused(given: str) -> None:
    with pytest.raises(typer.BadParameter, match="Give a number and a unit"):
        rate.parse_rate(given)


def test_batches_are_small_enough_for_several_per_second() -> None:
    assert [batch_size(per_second) for per_second in (None, 0.5, 10, 1000, 10**6)] == [500, 1, 2, 200, 500]


# retry-now


def test_retry_now_makes_a_waiting_task_due_without_counting_an_attempt(
    stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGEST_RETRY_BASE_BACKOFF_MS", "60000")  # on a busy machine a second passes before the command
    settings.current.cache_clear()
    (task,) = submitted({"fail": 1})
    deliver(engine(), [task])
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
    deliver(engine(), [task])
    assert statuses([task]) == ["SUCCEEDED"]


def test_a_scheduled_task_runs_now_and_its_old_wakeup_does_not_run_it_again(
    stack: ServersOfTests,
) -> None:
    (task,) = submitted({}, run_at=timedelta(hours=1))
    assert manage("retry-now", task).code == 0
    assert after_commit_publisher().wait_until_idle(60)
    assert [str(task)] in woken(stack)
    deliver(engine(), [task])
    move(stack, 3601)
    ticks.run("relay")
    deliver(engine(), [task])
    assert work.transitions(task) == [(None, "QUEUED"), ("QUEUED", "RUNNING"), ("RUNNING", "SUCCEEDED")]


def test_retry_now_requeues_a_dead_task(stack: ServersOfTests) -> None:
    (task,) = dead()
    assert "was DEAD and is due now" in manage("retry-now", task).out
    assert work.transitions(task, "to_status, actor")[-1] == ("QUEUED", operator())


def test_retry_now_refuses_a_running_or_finished_task(stack: ServersOfTests) -> None:
    (done,) = submitted({})
    deliver(engine(), [done])
    (running,) = submitted({})
    with engine().begin() as connection:
        claim.claim(connection, [running], handlers=handlers(), holder="w", lease_seconds=60)
    for task, sentence in [(running, "is running"), (done, "does not run again"), (uuid.UUID(int=1), "no task")]:
        refused = manage("retry-now", task)
        assert (refused.code, sentence in refused.err) == (1, True), refused
    assert manage("retry-now", "17").code == 2


def test_retry_now_refuses_a_task_that_is_already_due(stack: ServersOfTests) -> None:
    (task,) = submitted({})
    before = work.wakeups()
    refused = manage("retry-now", task)
    assert (refused.code, "due already" in refused.err) == (1, True)
    assert [wakeup.id for wakeup in work.wakeups()] == [wakeup.id for wakeup in before]
