"""The workflows page shows each stage as the ledger has it, and its picture says what runs, has failed or waits."""

from __future__ import annotations

import json
import re
import uuid
from typing import Any

import pytest
from fastapi.testclient import TestClient

from api.tokens import Scope
from console.workflows import PAGE
from models.engine import engine
from models.sql import sql
from tasks.execution.deliver import deliver
from tests.api.callers import make_token
from tests.console.visits import hidden_fields, logged_in, words
from tests.servers import ServersOfTests
from tests.tasks.deliveries import change, claimed, scalar, statements, submitted
from tests.workflows.flows import flow
from workflows import TYPE, StageInput, stage
from workflows.payload import parse
from workflows.progress import MOST_OUTPUT

XSS = "<img src=x onerror=alert(1)>\"'><script>alert(1)</script>&amp;"
FAIL: set[str] = set()


@stage("test.echo")
def echo(given: StageInput) -> Any:
    if given.name in FAIL:
        raise RuntimeError(f"{XSS} secret.example:5432 refused {given.name}")
    return {"echo": given.input}


def echoing(*names: str, **more: Any) -> dict[str, Any]:
    return flow(*({"name": name, "kind": "python", "function": "test.echo"} for name in names), **more)


@pytest.fixture(autouse=True)
def _none_fails() -> None:
    FAIL.clear()


@pytest.fixture
def ann(stack: ServersOfTests) -> TestClient:
    return logged_in(make_token("ann", Scope.OPERATE, Scope.WORKFLOWS_SUBMIT))


def reader() -> TestClient:
    return logged_in(make_token("eve", Scope.TASKS_READ_ALL))


def submit(payload: Any, *, runs: bool = True, **how: Any) -> uuid.UUID:
    (id_,) = submitted(1, TYPE, payload, **how)
    if runs:
        deliver(engine(), [id_])
    return id_


def page(browser: TestClient, path: str = PAGE) -> str:
    answer = browser.get(path)
    assert answer.status_code == 200, answer.text
    return str(answer.text)


def boxes(shown: str) -> list[str]:
    """Return what the picture for wide screens says about each stage."""
    picture = shown.partition("flow-of-stages right")[2].partition("</svg>")[0]
    return [re.sub(r"\d+(\.\d+)? m?s", "…", each) for each in re.findall(r'aria-label="([^"]*)"', picture)[1:]]


def add_step(task_id: uuid.UUID, name: str, output: Any = None, **notes: Any) -> None:
    result = json.dumps({"output": output, "kind": "python", "seconds": 1.25, "attempt": 1, **notes})
    statement = sql("INSERT INTO ledger.task_step (task_id, name, result) VALUES (:id, :name, CAST(:result AS jsonb))")
    with engine().begin() as connection:
        connection.execute(statement, {"id": task_id, "name": name, "result": result})


def test_an_empty_page_shows_how_the_first_workflow_is_made(ann: TestClient) -> None:
    shown = words(page(ann))
    assert "./manage.py submit workflow.execute" in shown
    assert "from workflows import stage" in shown
    (payload,) = re.findall(r"workflow.execute '({.*?]})'", shown)
    assert [each.name for each in parse(json.loads(payload)).stages] == ["short"]


def test_a_finished_workflow_shows_all_stages_done_with_their_outputs(ann: TestClient) -> None:
    id_ = submit(echoing("one", "two", workflowId="order 17", input={"number": 17}))
    shown = page(ann, f"{PAGE}/{id_}")
    assert boxes(shown) == ["one: done in …", "two: done in …"]
    assert shown.count("&#34;echo&#34;: {") == 3, "two outputs, and the result"
    assert '<h1 class="long">order 17</h1>' in shown
    assert "2 of 2 stages" in words(shown)
    assert f"/console/tasks/{id_}" in shown
    listed = words(page(ann))
    assert "2 of 2 – succeeded 0" in listed
    assert "order 17" in listed


def test_a_failed_stage_is_marked_and_those_after_it_wait(ann: TestClient) -> None:
    FAIL.add("two")
    id_ = submit(echoing("one", "two", "three"))
    shown = page(ann, f"{PAGE}/{id_}")
    assert boxes(shown) == ["one: done in …", "two: retrying", "three: waiting"]
    assert "refused two" in words(shown)
    assert "Next attempt" in words(shown)
    assert "1 of 3 two retrying retrying 1" in words(page(ann))
    for _ in range(2):
        change(id_, "next_retry_at = ledger.ledger_now()")
        deliver(engine(), [id_])
    shown = page(ann, f"{PAGE}/{id_}")
    assert boxes(shown) == ["one: done in …", "two: failed", "three: waiting"]
    assert "Why it is dead" in words(shown)
    assert "continues after the stages that are done" in words(shown)
    assert "1 of 3 two failed dead 3" in words(page(ann))


def test_a_running_workflow_shows_which_stage_runs_and_for_how_long(ann: TestClient) -> None:
    id_ = submit(echoing("one", "two"), runs=False)
    assert boxes(page(ann, f"{PAGE}/{id_}")) == ["one: next", "two: waiting"]
    claimed([id_])
    assert boxes(page(ann, f"{PAGE}/{id_}")) == ["one: running for …", "two: waiting"]
    add_step(id_, "one")
    with engine().begin() as connection:
        connection.execute(sql("UPDATE ledger.task_step SET created_at = created_at - interval '3 seconds'"))
    change(id_, "updated_at = updated_at - interval '9 minutes'")
    shown = page(ann, f"{PAGE}/{id_}")
    assert "running for 3" in shown, "since the stage before it ended, not since the task was claimed"
    assert boxes(shown) == ["one: done in …", "two: running for …"]
    assert 'data-refresh="2"' in shown
    assert "1 of 2 two running running 0" in words(page(ann))


def test_a_discarded_workflow_has_stages_that_do_not_run(ann: TestClient) -> None:
    id_ = submit(echoing("one"), runs=False)
    change(id_, "status = 'DISCARDED', finished_at = ledger.ledger_now()")
    assert boxes(page(ann, f"{PAGE}/{id_}")) == ["one: not run"]


def test_a_picture_of_fifty_stages_has_a_box_and_an_arrow_for_each(ann: TestClient) -> None:
    id_ = submit(echoing(*(f"stage-{number}-{'x' * 60}" for number in range(50))), runs=False)
    shown = page(ann, f"{PAGE}/{id_}")
    right, down = (shown.partition(f"flow-of-stages {way}")[2].partition("</svg>")[0] for way in ("right", "down"))
    for picture in (right, down):
        assert picture.count('class="station') == 50
        assert picture.count('class="head"') == 49
    places = re.findall(r"translate\(([\d.]+) ([\d.]+)\)", right)
    assert len(set(places)) == 50, "no box covers another one"
    assert "0 of 50" in words(page(ann))


def test_a_long_output_is_cut_and_can_be_shown_whole(ann: TestClient) -> None:
    id_ = submit(echoing("one", "two"), runs=False)
    long = "x" * (MOST_OUTPUT + 100)
    add_step(id_, "one", output=long)
    add_step(id_, "two", output=None)
    shown = page(ann, f"{PAGE}/{id_}")
    assert long not in shown
    assert f"the first {MOST_OUTPUT:,} of {MOST_OUTPUT + 102:,} characters" in shown
    assert ">null<" in shown, "an output can be null"
    assert long in page(ann, f"{PAGE}/{id_}?whole=one")


@pytest.mark.parametrize(
    "payload", [{}, [], "text", None, 7, {"stages": []}, {"stages": [{"name": {}}]}, flow(input=1)]
)
def test_a_payload_that_is_not_a_workflow_is_said_in_a_sentence(ann: TestClient, payload: Any) -> None:
    id_ = submit(payload)
    shown = page(ann, f"{PAGE}/{id_}")
    assert "The workflow is invalid: " in shown
    assert "<svg" not in shown.partition("<main")[2]
    assert "not a valid workflow" in words(page(ann))


def test_other_tasks_are_neither_listed_nor_drawn(ann: TestClient) -> None:
    (id_,) = submitted(1, "demo.flaky", {})
    answer = ann.get(f"{PAGE}/{id_}")
    assert (answer.status_code, answer.headers["location"]) == (303, f"/console/tasks/{id_}")
    assert str(id_) not in page(ann)
    for unknown in (uuid.uuid4(), "x"):
        assert ann.get(f"{PAGE}/{unknown}").status_code == 404


def test_the_latest_changes_come_first_whatever_their_status(ann: TestClient) -> None:
    ids = [submit(echoing("one", workflowId=f"flow {number}"), runs=False) for number in range(5)]
    for id_, status in zip(ids, ("SUCCEEDED", "DEAD", "QUEUED", "DISCARDED", "RETRYING"), strict=True):
        is_final = status in ("SUCCEEDED", "DEAD", "DISCARDED")
        more = ", finished_at = ledger.ledger_now()" if is_final else ", next_retry_at = ledger.ledger_now()"
        error = ", error_message = 'x', last_error = 'x', error_code = 'permanent'" if status == "DEAD" else ""
        change(id_, f"status = '{status}', updated_at = ledger.ledger_now(){more}{error}")
    running = submit(echoing("one", workflowId="flow 5"), runs=False)
    claimed([running])
    assert re.findall(r">flow (\d)<", page(ann)) == ["5", "4", "3", "2", "1", "0"]


def test_a_page_takes_few_statements_however_many_stages_there_are(ann: TestClient) -> None:
    id_ = submit(echoing(*(f"s{number}" for number in range(20))))
    for path in (PAGE, f"{PAGE}/{id_}"):
        with statements() as sent:
            page(ann, path)
        assert len(sent) <= 5, sent


def test_a_reader_sees_no_outputs_no_message_and_no_form(ann: TestClient) -> None:
    FAIL.add("two")
    id_ = submit(echoing("one", "two", input="given"))
    eve = reader()
    shown = page(eve, f"{PAGE}/{id_}")
    assert boxes(shown) == ["one: done in …", "two: retrying"]
    assert "echo&#34;:" not in shown
    assert "secret.example" not in shown
    assert "The handler failed." in shown
    assert "&#34;given&#34;" in shown, "the payload is visible, as in the API"
    assert "secret.example" in page(ann, f"{PAGE}/{id_}")
    for path in (PAGE, f"{PAGE}/{id_}"):
        assert not re.search(r"<(form|button|textarea)", page(eve, path).partition("<main")[2])
    token = hidden_fields(page(eve))["form_token"]
    answer = eve.post(PAGE, data={"form_token": token, "workflow": json.dumps(echoing("one"))})
    assert answer.status_code == 403
    assert "eve lacks the scope workflows:submit" in words(answer.text)
    assert scalar("SELECT count(*) FROM ledger.ingest_task") == 1
    assert logged_in(make_token("joe", Scope.WORKFLOWS_SUBMIT)).get(PAGE).status_code == 403


def test_a_workflow_is_submitted_and_shown(ann: TestClient) -> None:
    token = hidden_fields(page(ann))["form_token"]
    text = json.dumps({**echoing("one"), "priority": 7})
    answer = ann.post(PAGE, data={"form_token": token, "workflow": text})
    assert answer.status_code == 303
    shown = page(ann, answer.headers["location"])
    assert "The workflow was submitted." in words(shown)
    assert boxes(shown) == ["one: next"]
    assert scalar("SELECT context ->> 'principal' FROM ledger.ingest_task WHERE priority = 7") == "ann"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "JSON"),
        ("{", "JSON"),
        ("[]", "must be an object"),
        ("{}", "`stages` is required"),
        (json.dumps(flow({"name": "a", "kind": "python", "function": XSS})), "No stage function is named"),
    ],
)
def test_a_workflow_that_is_refused_stays_in_the_form(ann: TestClient, text: str, why: str) -> None:
    token = hidden_fields(page(ann))["form_token"]
    answer = ann.post(PAGE, data={"form_token": token, "workflow": text})
    assert answer.status_code == 400
    assert why in words(answer.text)
    (kept,) = re.findall(r"<textarea[^>]*>(.*?)</textarea>", answer.text, re.DOTALL)
    assert words(kept) == text
    assert "<img" not in answer.text.partition("<main")[2]
    assert scalar("SELECT count(*) FROM ledger.ingest_task") == 0


def test_a_form_without_the_token_of_the_session_submits_nothing(ann: TestClient) -> None:
    text = json.dumps(echoing("one"))
    for given in ({}, {"form_token": "x"}):
        assert ann.post(PAGE, data={**given, "workflow": text}).status_code == 403
    assert scalar("SELECT count(*) FROM ledger.ingest_task") == 0


def test_markup_in_every_text_is_escaped(ann: TestClient) -> None:
    FAIL.add("two")
    printable = XSS.replace("\n", "")
    http = {"name": "three", "kind": "http", "destination": XSS, "body": {XSS: "{one}"}}
    id_ = submit({**echoing("one", "two", workflowId=printable, input={XSS: XSS})})
    flat = submit(
        flow(http, {"name": "ask", "kind": "llm", "model": XSS, "prompt": XSS}, input=XSS)
        | {
            "stages": [
                {"name": "one", "kind": "python", "function": XSS},
                http,
            ]
        }
    )
    bad = submit({XSS: XSS, "workflowId": XSS, "stages": [{"name": XSS, "kind": XSS}]})
    for path in (PAGE, f"{PAGE}/{id_}", f"{PAGE}/{flat}", f"{PAGE}/{bad}", f"{PAGE}/{id_}?whole={XSS}"):
        body = page(ann, path).partition("<main")[2]
        assert "<img" not in body, path
        assert "<script" not in body, path
        assert "&lt;img" in body, path
