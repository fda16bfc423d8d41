"""What an operator does with one task on its page changes the ledger, says so, and is refused for everyone else."""

from __future__ import annotations

import json
import uuid
from datetime import timedelta
from typing import Any

import pytest
from fastapi.testclient import TestClient

import settings
from api.tokens import Scope
from console.app import console
from console.task_actions import LONGEST_EDITED, ROUTES
from console.visitors import FORM_FIELD
from models.engine import engine
from models.sql import sql
from tasks.execution.deliver import deliver
from tests.api.callers import FLAKY, make_token
from tests.console.forms import XSS, is_escaped, page_of, refuses_reader_and_foreigner, sent
from tests.console.visits import hidden_fields, logged_in, words
from tests.servers import ServersOfTests
from tests.tasks.command_line import buried, dead, submitted
from tests.tasks.deliveries import change, claimed, scalar
from tests.tasks.work import task, transitions, wakeups

LATER = timedelta(minutes=10)
POSTS = [route.path for route in ROUTES if "POST" in (route.methods or ())]
CHANGES = "from_status, to_status, message, actor"


@pytest.fixture
def browser(ledger: ServersOfTests) -> TestClient:
    return logged_in(make_token("ann", Scope.OPERATE, Scope.TASKS_SUBMIT))


def done(browser: TestClient, id_: uuid.UUID, action: str, **fields: str) -> str:
    """Press a button on the page of a task; return what the page says then."""
    path = f"/console/tasks/{id_}"
    place, said = sent(browser, f"{path}/{action}", page=path, **fields)
    assert place == path
    return said


def edited(browser: TestClient, id_: uuid.UUID, payload: str, fields: dict[str, str] | None = None) -> Any:
    """Submit a task again with this payload, as a browser sends the form."""
    path = f"/console/tasks/{id_}/edit"
    fields = fields or form_of(browser, id_)
    return browser.post(path, data={**fields, "payload": payload}, files=[])


def form_of(browser: TestClient, id_: uuid.UUID) -> dict[str, str]:
    """Return the hidden fields of the form that submits a task again."""
    page = page_of(browser, f"/console/tasks/{id_}/edit")
    return hidden_fields("<form " + page.partition('<form class="edit" ')[2])


def test_a_task_that_waits_for_its_time_runs_now(browser: TestClient) -> None:
    (id_,) = submitted({}, run_at=LATER)
    before = len(wakeups())
    assert "The task is due now; it was QUEUED." in done(browser, id_, "run-now", reason="the shop asked\0")
    assert len(wakeups()) == before + 1
    audit = "SELECT code || ' ' || worker_id || ' ' || detail FROM ledger.task_audit"
    assert scalar(audit).startswith("retry_now console:ann the shop asked; was due at")
    deliver(engine(), [id_])
    assert task(id_)["status"] == "SUCCEEDED"
    (due,) = submitted({})
    assert "is due already" in done(browser, due, "run-now")


def test_a_dead_task_is_requeued_and_can_forget_its_steps(browser: TestClient) -> None:
    (id_,) = dead()
    with engine().begin() as connection:
        connection.execute(sql("INSERT INTO ledger.task_step (task_id, name) VALUES (:id, 'charge')"), {"id": id_})
    assert "Forget the 1 finished step" in words(page_of(browser, f"/console/tasks/{id_}"))
    assert "The task is queued again" in done(browser, id_, "requeue", reason="repaired")
    assert transitions(id_, CHANGES)[-1] == ("DEAD", "QUEUED", "repaired", "console:ann")
    assert scalar("SELECT count(*) FROM ledger.task_step") == 1
    assert "is QUEUED, not DEAD" in done(browser, id_, "requeue")
    deliver(engine(), [id_])
    assert "its steps are forgotten" in done(browser, id_, "requeue", reset_steps="1")
    assert scalar("SELECT count(*) FROM ledger.task_step") == 0
    assert task(id_)["status"] == "QUEUED"


def test_a_task_whose_sinks_have_forgotten_it_is_requeued_only_if_duplicates_are_accepted(
    browser: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"url": "postgresql://me@127.0.0.1:1/none", "guarantee": "keyed", "key_life_hours": 48}
    monkeypatch.setenv("SINKS", json.dumps({"place": place}))
    settings.current.cache_clear()
    with engine().begin() as connection:
        connection.execute(sql(f"INSERT INTO ledger.sink_use (type, sink) VALUES ('{FLAKY}', 'place')"))
    (id_,) = dead()
    assert "accept_duplicates" not in page_of(browser, f"/console/tasks/{id_}")
    change(id_, "created_at = created_at - interval '49 hours'")
    assert "accept_duplicates" in page_of(browser, f"/console/tasks/{id_}")
    assert "no longer remember its effects" in done(browser, id_, "requeue")
    assert task(id_)["status"] == "DEAD"
    assert "The task is queued again" in done(browser, id_, "requeue", accept_duplicates="1")
    assert task(id_)["status"] == "QUEUED"


@pytest.mark.parametrize("status", ["QUEUED", "RUNNING", "DEAD"])
def test_a_task_is_discarded_with_two_clicks(browser: TestClient, status: str) -> None:
    (id_,) = dead() if status == "DEAD" else submitted({})
    if status == "RUNNING":
        claimed([id_])
    page = page_of(browser, f"/console/tasks/{id_}")
    fold = page[page.rindex("<details", 0, page.index("/discard")) : page.index("/discard")]
    assert "</details>" not in fold  # the button is inside, so one click is not enough
    assert " open" not in fold.partition(">")[0]
    assert f"The task is discarded; it was {status}." in done(browser, id_, "discard", reason="ordered twice")
    assert transitions(id_, CHANGES)[-1] == (status, "DISCARDED", "ordered twice", "console:ann")
    assert "is DISCARDED already" in done(browser, id_, "discard")
    page = page_of(browser, f"/console/tasks/{id_}")
    assert "/discard" not in page
    assert "/requeue" not in page


def test_a_task_is_submitted_again_with_an_edited_payload_and_names_its_origin(browser: TestClient) -> None:
    given: dict[str, Any] = {"key": "invoice 17", "partition_key": "customer 5", "priority": 7, "max_attempts": 4}
    (old,) = submitted({"n": 1}, context={"user": "bob", "traceId": "t1"}, **given)
    answer = edited(browser, old, '{"n": 2, "name": "Grüße"}')
    assert answer.status_code == 303, words(answer.text)
    path = answer.headers["location"]
    new = task(uuid.UUID(path.rpartition("/")[2]))
    kept = {"type": FLAKY, "queue": "ingest", "priority": 7, "max_attempts": 4, "partition_key": "customer 5"}
    assert {name: new[name] for name in kept} == kept
    assert new["payload"] == {"n": 2, "name": "Grüße"}
    assert new["idempotency_key"] not in (None, "invoice 17")
    assert {**new["context"], "traceparent": None} == {
        "user": "bob",
        "traceId": "t1",
        "origin": str(old),
        "principal": "ann",
        "traceparent": None,
    }
    page = page_of(browser, path)
    assert f"Submitted. This is the new task; it comes from {old}." in words(page)
    assert f'href="/console/tasks/{old}"' in page
    assert task(old)["payload"] == {"n": 1}


def test_a_form_that_is_sent_twice_submits_one_task(browser: TestClient) -> None:
    (old,) = submitted({"n": 1}, key="invoice 17")
    fields = form_of(browser, old)
    places = {edited(browser, old, '{"n": 2}', fields).headers["location"] for _ in range(2)}
    assert len(places) == 1
    assert scalar("SELECT count(*) FROM ledger.ingest_task") == 2
    changed = edited(browser, old, '{"n": 3}', fields)
    assert changed.status_code == 422
    assert scalar("SELECT count(*) FROM ledger.ingest_task") == 2
    assert edited(browser, old, '{"n": 2}').headers["location"] not in places, "a new form is a new task"
    without = browser.post(f"/console/tasks/{old}/edit", data={FORM_FIELD: fields[FORM_FIELD], "payload": "{}"})
    assert without.status_code == 422
    assert scalar("SELECT count(*) FROM ledger.ingest_task") == 3


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"n": }' + XSS, "The payload is not JSON: Expecting value at line 1, column 7."),
        ("NaN", "NaN and Infinity are not JSON"),
        ("[" * 100 + "]" * 100, "levels deep"),
        ("[" * 20_000, "nested too deep"),
        ('"\\ud800"', "payload"),
        ("1" * 5_000, "digits"),
        ("", "The payload is not JSON"),
    ],
)
def test_a_payload_that_is_refused_is_a_sentence_and_the_text_is_not_lost(
    browser: TestClient, text: str, sentence: str
) -> None:
    (id_,) = submitted({"n": 1})
    answer = edited(browser, id_, text)
    assert answer.status_code == 422
    assert sentence in words(answer.text)
    assert (text.replace(XSS, "") or "</textarea>") in answer.text.replace("&#34;", '"')
    assert scalar("SELECT count(*) FROM ledger.ingest_task") == 1
    if XSS in text:
        assert is_escaped(answer.text)


def test_a_payload_of_the_longest_size_can_be_submitted_by_form(browser: TestClient) -> None:
    (id_,) = submitted({"n": 1})
    assert edited(browser, id_, json.dumps("a" * (LONGEST_EDITED - 2))).status_code == 303


def test_a_type_with_a_scope_of_its_own_is_submitted_only_with_it(browser: TestClient) -> None:
    (id_,) = buried(1, type="http.request")
    page = page_of(browser, f"/console/tasks/{id_}")
    assert "your token lacks the scope http:request" in words(page)
    assert f"/console/tasks/{id_}/edit" not in page
    assert browser.get(f"/console/tasks/{id_}/edit").status_code == 403
    token = hidden_fields(page)[FORM_FIELD]
    answer = browser.post(f"/console/tasks/{id_}/edit", data={FORM_FIELD: token, "payload": "{}"})
    assert answer.status_code == 403
    assert scalar("SELECT count(*) FROM ledger.ingest_task") == 1
    allowed = logged_in(make_token("bob", Scope.OPERATE, Scope.TASKS_SUBMIT, Scope.HTTP_REQUEST))
    assert f"/console/tasks/{id_}/edit" in page_of(allowed, f"/console/tasks/{id_}")


@pytest.mark.parametrize(
    ("scopes", "types", "why"),
    [
        ([Scope.OPERATE], [], "your token lacks the scope tasks:submit"),
        ([Scope.OPERATE, Scope.HTTP_REQUEST], [], "your token lacks the scope tasks:submit"),
        ([Scope.OPERATE, Scope.TASKS_SUBMIT], ["invoice.*"], "your token may not submit this type"),
    ],
)
def test_a_token_that_may_not_submit_to_the_api_submits_nothing_here_either(
    browser: TestClient, scopes: list[Scope], types: list[str], why: str
) -> None:
    (id_,) = submitted({"n": 1})
    limited = logged_in(make_token("eve", *scopes, types=types))
    page = page_of(limited, f"/console/tasks/{id_}")
    assert why in words(page)
    assert f"/console/tasks/{id_}/edit" not in page
    assert limited.get(f"/console/tasks/{id_}/edit").status_code == 403
    fields = {FORM_FIELD: hidden_fields(page)[FORM_FIELD], "payload": "{}"}
    assert limited.post(f"/console/tasks/{id_}/edit", data=fields).status_code == 403
    assert scalar("SELECT count(*) FROM ledger.ingest_task") == 1


def test_readers_and_forms_of_other_pages_change_nothing(browser: TestClient) -> None:
    reader = logged_in(make_token("eve", Scope.TASKS_READ_ALL))
    (died,) = dead()
    (waits,) = submitted({}, run_at=LATER)
    assert len(POSTS) == 4
    for id_ in (died, waits):
        for path in (each.format(id=id_) for each in POSTS):
            assert refuses_reader_and_foreigner(reader, browser, path, page=f"/console/tasks/{id_}"), path
    assert reader.get(f"/console/tasks/{died}/edit").status_code == 403
    assert (task(died)["status"], task(waits)["next_retry_at"] is not None) == ("DEAD", True)
    assert scalar("SELECT count(*) FROM ledger.ingest_task") == 2


def test_an_unknown_task_cannot_be_changed(browser: TestClient) -> None:
    token = hidden_fields(page_of(browser, "/console"))[FORM_FIELD]
    for path in POSTS:
        answer = browser.post(path.format(id=uuid.uuid4()), data={FORM_FIELD: token, "payload": "1"})
        if answer.status_code == 303:
            answer = browser.get(answer.headers["location"])
        assert answer.status_code == 404
        assert browser.post(path.format(id="x"), data={FORM_FIELD: token}).status_code == 404


def test_the_routes_are_those_of_the_console() -> None:
    assert all(route in console.routes for route in ROUTES)
