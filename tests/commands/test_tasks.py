"""submit, tasks, show, stats, reclaim and rebuild-broker."""

from __future__ import annotations

import json
import math
import uuid
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from models.clock import now
from models.engine import engine
from models.sql import sql
from models.status import TaskStatus
from outbox.after_commit_publisher import after_commit_publisher
from tasks import broker
from tasks.core import batch_size
from tasks.core.registry import DEFAULT_BATCH, handlers
from tasks.core.wakeups import Woken
from tasks.execution.claim import claim
from tasks.execution.deliver import deliver
from tasks.operations import rebuild_broker
from tasks.submission import json_lines
from tests.outbox.ledger import arrived, move, woken
from tests.outbox.ledger import rows as events
from tests.servers import ServersOfTests
from tests.tasks import work
from tests.tasks.command_line import DIES, FLAKY, buried, change, dead, manage, statuses, submitted
from tests.tasks.registrations import handler_of, no_worker_processes, registered

UNKNOWN = uuid.UUID(int=1)


# submit


def test_every_option_of_submit_reaches_the_task(stack: ServersOfTests) -> None:
    options = ["--key", "k", "--priority", 9, "--run-at", "10m", "--max-attempts", 3, "--context", '{"traceId": "t"}']
    done = manage("submit", FLAKY, '{"fail": 2}', *options, "--json")
    (task,) = work.rows("id")[0]
    assert done.json == {"taskId": str(task), "status": "QUEUED", "created": True}
    row = work.task(task)
    assert (row["type"], row["payload"], row["idempotency_key"]) == (FLAKY, {"fail": 2}, "k")
    assert (row["priority"], row["max_attempts"], row["context"]) == (9, 3, {"traceId": "t"})
    assert row["next_retry_at"] - row["created_at"] == timedelta(minutes=10)
    assert manage("submit", FLAKY, '{"fail": 2}', *options, "--json").json["created"] is False
    assert "exists already" in manage("submit", FLAKY, '{"fail": 2}', *options).out


def test_a_payload_comes_from_a_file_or_from_stdin_or_is_null(stack: ServersOfTests, tmp_path: Path) -> None:
    file = tmp_path / "payload.json"
    file.write_bytes(b'\xef\xbb\xbf{"from": "file"}\n')
    assert manage("submit", FLAKY, f"@{file}").code == 0
    assert manage("submit", FLAKY, "-", stdin=b'{"from": "stdin"}').code == 0
    assert manage("submit", FLAKY).code == 0
    assert [payload for (payload,) in work.rows("payload")] == [{"from": "file"}, {"from": "stdin"}, None]


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        ([FLAKY, "{"], 2, "It is not JSON"),
        ([FLAKY, "NaN"], 2, "not JSON"),
        ([FLAKY, "[" * 100_000], 2, "nested too deeply"),
        ([FLAKY, '"\\u0000"'], 2, "NUL"),
        (["unknown.type", "1"], 2, "There is no handler for 'unknown.type'"),
        ([FLAKY, "1", "--queue", "nowhere"], 2, "There is no queue 'nowhere'"),
        ([FLAKY, "1", "--notify", "nowhere"], 2, "no destination 'nowhere'"),
        ([FLAKY, "1", "--context", "[]"], 2, "JSON object"),
        ([FLAKY, "1", "--run-at", "soon"], 2, "from now"),
        ([FLAKY, "1", "--priority", "10"], 2, "priority"),
        ([FLAKY, "1", "--lines"], 2, "@FILE"),
        ([FLAKY, "-", "--lines", "--key", "k"], 2, "--key names one task"),
        ([FLAKY, "@/does/not/exist"], 1, "No such file"),
    ],
    ids=lambda given: given[-1][:20] if isinstance(given, list) else "",
)
def test_a_refused_submit_is_one_sentence(
    stack: ServersOfTests, arguments: list[str], code: int, sentence: str
) -> None:
    refused = manage("submit", *arguments)
    assert refused.code == code
    assert sentence in " ".join(refused.err.replace("│", " ").split())
    assert work.rows() == []


def test_a_key_used_with_another_payload_is_refused_and_names_the_task(stack: ServersOfTests) -> None:
    (task,) = submitted({"a": 1}, key="k")
    refused = manage("submit", FLAKY, '{"a": 2}', "--key", "k")
    assert refused.code == 1
    assert str(task) in refused.err


def test_each_line_becomes_a_task(stack: ServersOfTests, tmp_path: Path) -> None:
    file = tmp_path / "payloads.jsonl"
    file.write_text("".join(f'{{"n": {n}}}\n\n' for n in range(2500)))
    done = manage("submit", FLAKY, f"@{file}", "--lines", "--priority", 7)
    assert done.out == "Submitted 2,500: 2,500 new, 0 existed already.\n"
    rows = work.rows("payload, priority")
    assert sorted(payload["n"] for payload, _ in rows) == list(range(2500))
    assert {priority for _, priority in rows} == {7}
    assert len(work.wakeups()) == math.ceil(2500 / DEFAULT_BATCH)


def test_an_invalid_line_is_named_and_nothing_is_submitted(
    stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_lines, "LINE_LIMIT", 50)
    lines = [b"1"] * 1200 + [b"{", b'"' + b"x" * 200 + b'"', b'"\xff"', b"2"]
    refused = manage("submit", FLAKY, "-", "--lines", stdin=b"\n".join(lines))
    assert refused.code == 2
    assert work.rows() == []
    said = refused.err.splitlines()
    assert said[0].startswith("manage.py: line 1,201: It is not JSON")
    assert said[1].startswith("manage.py: line 1,202: It has more than")
    assert said[2] == "manage.py: line 1,203: It is not UTF-8."
    assert said[3] == "manage.py: Nothing was submitted: 3 of 1,204 lines are invalid."


def test_a_failure_half_way_reports_which_lines_were_submitted(stack: ServersOfTests) -> None:
    submitted({"a": 1}, key="taken")
    envelopes: list[dict[str, Any]] = [{"payload": n} for n in range(1500)]
    envelopes[1200] = {"payload": {"a": 2}, "context": {"idempotencyKey": "taken"}}
    written = "\n".join(map(json.dumps, envelopes)).encode()
    stopped = manage("submit", FLAKY, "-", "--lines", "--envelopes", stdin=written)
    assert stopped.code == 1
    assert stopped.out == "Submitted 1,000: 1,000 new, 0 existed already.\n"
    assert "Line 1,201: The key belongs to the task" in stopped.err
    assert "The lines up to 1,000 are submitted, those from 1,001 on are not." in stopped.err
    assert len(work.rows()) == 1001


def test_envelopes_bring_their_own_type_key_and_retries(stack: ServersOfTests) -> None:
    first = {"type": FLAKY, "payload": 1, "context": {"idempotencyKey": "k", "user": 7}, "retry": {"max": 2}}
    written = "\n".join(map(json.dumps, [first, first, {"type": FLAKY, "payload": 2}])).encode()
    done = manage("submit", "-", "--lines", "--envelopes", "--json", stdin=written)
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert [(line["line"], line["created"]) for line in lines] == [(1, True), (2, False), (3, True)]
    assert lines[0]["taskId"] == lines[1]["taskId"]
    row = work.task(uuid.UUID(lines[0]["taskId"]))
    assert (row["idempotency_key"], row["max_attempts"], row["context"]) == ("k", 2, {"user": 7})
    assert manage("submit", "-", "--envelopes", stdin=b'{"payload": 1}').code == 2


# tasks


def listed(*options: object) -> dict[str, Any]:
    found: dict[str, Any] = manage("tasks", *options, "--json").json
    return found


def test_a_list_shows_every_status_with_the_latest_change_first(stack: ServersOfTests) -> None:
    done, discarded, died, retrying = submitted({}, {"discard": "why"}, DIES, {"fail": 1}, key=None)
    deliver(engine(), [done, discarded, died, retrying])
    (running,) = submitted({})
    with engine().begin() as connection:
        claim(connection, [running], handlers=handlers(), holder="w", lease_seconds=60)
    (queued,) = submitted({})
    found = listed()["tasks"]
    assert [each["taskId"] for each in found[:2]] == [str(queued), str(running)]
    assert Counter(each["status"] for each in found) == dict.fromkeys(TaskStatus, 1)
    for task, status in [(queued, "QUEUED"), (running, "RUNNING"), (retrying, "retrying"), (died, "dead")]:
        assert [each["taskId"] for each in listed("--status", status)["tasks"]] == [str(task)]
    assert len(listed("--status", "SUCCEEDED", "--status", "DISCARDED")["tasks"]) == 2


def test_pages_in_both_directions_neither_skip_nor_repeat_a_task(stack: ServersOfTests) -> None:
    expected = sorted([*buried(5), *submitted({}, {}, {})], reverse=True)  # two times of change, several tasks each
    expected.sort(key=lambda id_: work.task(id_)["finished_at"] or work.task(id_)["updated_at"], reverse=True)
    first = listed("--limit", 3)
    second = listed("--limit", 3, "--before", first["before"])
    third = listed("--limit", 3, "--before", second["before"])
    pages = [*first["tasks"], *second["tasks"], *third["tasks"]]
    assert [each["taskId"] for each in pages] == list(map(str, expected))
    assert third["before"] is None
    assert listed("--limit", 3, "--after", third["after"])["tasks"] == second["tasks"]
    assert f"--before {first['before']}" in manage("tasks", "--limit", 3).out
    assert manage("tasks", "--before", "page 2").code == 2


def test_a_list_is_filtered_by_type_queue_key_and_time(stack: ServersOfTests) -> None:
    (keyed,) = submitted({}, key="k")
    (old,) = buried(1, type="another", queue="other")
    change([old], "finished_at = finished_at - interval '1 hour'")
    for options, task in [
        (["--type", "another"], old),
        (["--queue", "other"], old),
        (["--until", "30m"], old),
        (["--since", "30m"], keyed),
        (["--key", "k"], keyed),
        (["--key", "k", "--type", FLAKY], keyed),
    ]:
        assert [each["taskId"] for each in listed(*options)["tasks"]] == [str(task)], options
    assert listed("--key", "k", "--type", "another")["tasks"] == []


def test_stored_text_cannot_control_the_markup_or_the_terminal(stack: ServersOfTests) -> None:
    (task,) = dead({"permanent": "[red]no\x1b[31m\x9b2J\u202e"})
    for done in (manage("tasks"), manage("show", task), manage("requeue-dead", "--dry-run")):
        assert done.code == 0
        assert "[red]no [31m 2J" in done.out
        assert not {"\x1b", "\x9b"} & set(done.out)


# show


def test_show_prints_the_history_and_cuts_a_long_payload_except_in_json(stack: ServersOfTests) -> None:
    (task,) = dead({**DIES, "long": "x" * 2000})
    found = manage("show", task, "--json").json
    assert (found["taskId"], found["status"], found["attemptCount"]) == (str(task), "DEAD", 1)
    assert found["retry"] == {"count": 1, "max": 10, "nextAttemptAt": None}
    assert (found["errorCode"], found["errorMessage"]) == ("permanent", "Permanent: it will never work")
    assert [each["toStatus"] for each in found["transitions"]] == ["QUEUED", "RUNNING", "DEAD"]
    assert found["payload"]["long"] == "x" * 2000
    assert [each["code"] for each in found["why"]] == ["final"]
    shown = manage("show", task).out
    assert "It has been DEAD since" in shown
    assert "Traceback" in shown
    assert "x" * 2000 not in shown.replace("\n", "").replace(" ", "")


def test_show_names_the_wakeup_and_the_missing_worker_of_a_waiting_task(stack: ServersOfTests) -> None:
    (task,) = submitted({}, run_at=timedelta(minutes=10))
    found = manage("show", task, "--json").json
    assert [each["code"] for each in found["why"]] == ["not_due", "no_worker"]
    assert [wakeup["nextRetryAt"] for wakeup in found["wakeups"]] == [found["nextRetryAt"]]


def test_show_names_the_type_that_no_live_worker_knows(stack: ServersOfTests) -> None:
    (task,) = submitted({})
    registered(handler_of("another.type"))
    with no_worker_processes():
        why, shown = manage("show", task, "--json").json["why"], manage("show", task).out
    messages = {each["code"]: each["message"] for each in why}
    assert messages["unknown_handler"].startswith(f"No live worker knows the type '{FLAKY}'.")
    assert messages["unknown_handler"] in " ".join(shown.split())


def test_show_names_the_worker_of_a_running_task_and_its_audits(stack: ServersOfTests) -> None:
    (task,) = submitted({})
    with engine().begin() as connection:
        held = claim(connection, [task], handlers=handlers(), holder="a worker", lease_seconds=60)
    with engine().begin() as connection:
        audit = sql("INSERT INTO ledger.task_audit (task_id, code, worker_id) VALUES (:id, 'late_success', 'sleeper')")
        connection.execute(audit, {"id": task})
    found = manage("show", task, "--json")
    assert (found.json["lease"]["holder"], found.json["audits"][0]["code"]) == ("a worker", "late_success")
    assert str(held.token) not in found.out
    assert "held by a worker" in " ".join(manage("show", task).out.split())


def test_an_unknown_task_fails_and_an_invalid_id_is_misuse(stack: ServersOfTests) -> None:
    assert (manage("show", UNKNOWN).code, manage("show", "17").code) == (1, 2)
    assert f"There is no task {UNKNOWN}" in manage("show", UNKNOWN).err


# reclaim, rebuild-broker


def test_reclaim_once_recovers_the_task_of_a_lost_worker(stack: ServersOfTests) -> None:
    move(stack, 600)  # leases get extra time after a start of the database and before the first look
    (task,) = submitted({})
    manage("reclaim", "--once")
    with engine().begin() as connection:
        claim(connection, [task], handlers=handlers(), holder="gone", lease_seconds=1)
        connection.execute(sql("UPDATE ledger.task_lease SET lease_until = lease_until - interval '1 minute'"))
        connection.commit()
    assert manage("reclaim", "--once", "--json").json == {
        "ran": True, "leases": 1, "charged": 1, "isolated": 0, "released": 0, "expired": 0, "wokenAgain": 0,
        "backlogAlerts": 0,
    }  # fmt: skip
    assert statuses([task]) == ["RETRYING"]


def test_two_reclaims_do_not_run_at_once(stack: ServersOfTests) -> None:
    with engine().begin() as connection:
        connection.execute(
            sql("""
            INSERT INTO ledger.tick (name, holder, lease_token, lease_until)
            VALUES ('reclaim', 'another', gen_random_uuid(), ledger.ledger_now() + interval '1 minute')""")
        )
    assert manage("reclaim", "--once", "--json").json == {"ran": False}
    assert "Another process" in manage("reclaim", "--once").out


def test_a_rebuild_after_the_broker_lost_everything_wakes_all_due_tasks_and_restores_dead_letters(
    stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    (died,) = dead()
    monkeypatch.setattr(batch_size, "_seconds", {})  # on a busy machine it was slow, and wake-ups would be smaller
    due = submitted(*[{}] * 2500)
    (scheduled,) = submitted({}, run_at=timedelta(hours=1))
    stack.flush_redis()
    said = manage("rebuild-broker", "--dry-run", "--json").json
    assert (said["tasks"], said["dead"], said["due"]) == (2500, 1, [{"queue": "ingest", "type": FLAKY, "count": 2500}])
    assert woken(stack) == []
    assert manage("rebuild-broker", "--json").json == {"tasks": 2500, "wakeups": 3, "letters": 1}
    assert after_commit_publisher().wait_until_idle(60)
    assert arrived(stack) == dict.fromkeys(map(str, due), 1)
    assert str(scheduled) not in arrived(stack)
    assert [payload["dead"] for (payload,) in events("payload", "payload ? 'dead' AND status = 'NEW'")] == [str(died)]


def test_a_rebuild_during_work_ends_and_runs_no_task_twice(
    stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rebuild_broker, "PAGE", 100)
    tasks = submitted(*[{}] * 150)
    new, seen = [], 0
    for so_far in rebuild_broker.wake_all_due(engine()):
        seen = so_far.tasks
        new += submitted({})  # a rebuild that also woke these would never end
        deliver(engine(), tasks[:50])
    assert after_commit_publisher().wait_until_idle(60)
    assert 100 <= seen <= 150
    wakeups = Counter(id_ for wakeup in work.wakeups() for id_ in wakeup.ids)
    assert {wakeups[task] for task in new} == {1}
    deliver(engine(), tasks)
    assert {tuple(work.transitions(task)) for task in tasks} == {
        ((None, "QUEUED"), ("QUEUED", "RUNNING"), ("RUNNING", "SUCCEEDED"))
    }


def test_an_unreachable_broker_is_reported_before_any_task_is_woken(
    stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted({})
    before = len(work.wakeups())
    monkeypatch.setattr(broker, "app", Celery(broker="redis://127.0.0.1:1/0", set_as_current=False))
    refused = manage("rebuild-broker")
    assert refused.code == 3
    assert "The broker does not answer" in refused.err
    assert len(work.wakeups()) == before


def test_tasks_due_at_the_same_moment_are_woken_page_by_page(
    stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rebuild_broker, "PAGE", 100)
    tasks = submitted(*[{}] * 2500, run_at=timedelta(seconds=1))
    with engine().connect() as connection:
        before = now(connection)
    move(stack, 2)
    assert list(rebuild_broker.wake_all_due(engine()))[-1] == Woken(2500, 3)
    assert after_commit_publisher().wait_until_idle(60)
    assert {last_wakeup_at > before for (last_wakeup_at,) in work.rows("last_wakeup_at")} == {True}
    assert sorted(id_ for wakeup in work.wakeups()[-3:] for id_ in wakeup.ids) == sorted(tasks)
