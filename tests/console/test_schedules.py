"""The page about schedules shows their runs, and pauses, resumes and runs them as the command line does."""

from __future__ import annotations

import re

import pytest
from fastapi.testclient import TestClient

from api.tokens import Scope
from models.engine import engine
from tasks.core.registered_types import LIVE_SECONDS
from tasks.operations.schedules import pause
from tasks.submission.occurrences import submit_due
from tests.api.callers import make_token
from tests.console.forms import XSS, is_escaped, page_of, refuses_reader_and_foreigner, sent
from tests.console.visits import logged_in, words
from tests.outbox.ledger import move
from tests.servers import ServersOfTests
from tests.tasks.command_line import manage
from tests.tasks.registrations import handler_of, registered
from tests.tasks.schedules import renew, scheduled, set_clock
from tests.tasks.work import rows

PATH = "/console/schedules"
POSTS = [f"{PATH}/{name}" for name in ("pause", "resume", "run")]
NAME = "test.hourly"


@pytest.fixture(autouse=True)
def _at_a_known_time(ledger: ServersOfTests) -> None:
    set_clock(ledger, "2026-11-18 07:59:30")


@pytest.fixture
def browser() -> TestClient:
    return logged_in(make_token("ann", Scope.OPERATE))


@pytest.fixture
def reader() -> TestClient:
    return logged_in(make_token("eve", Scope.TASKS_READ_ALL))


def card(page: str, name: str = NAME) -> str:
    found = re.search(rf'<section class="card unit" id="{name}">.*?</section>', page, re.DOTALL)
    assert found, page
    return words(found[0])


def test_next_and_last_run_are_shown_with_the_task_of_the_last_one(browser: TestClient, ledger: ServersOfTests) -> None:
    scheduled(timezone="Europe/Berlin", payload={"region": "north"})
    assert "Last run none so far" in card(page_of(browser, PATH))
    move(ledger, 31)
    submit_due(engine())
    ((task_id,),) = rows("id")
    page = page_of(browser, PATH)
    text = card(page)
    assert "active" in text
    assert "Rule 0 * * * * in Europe/Berlin" in text
    assert "in 60 m 2026-11-18 09:00:00 UTC" in text or "in 1 h 2026-11-18 09:00:00 UTC" in text
    assert "2026-11-18 08:00:00 UTC" in text
    assert text.split("Missed runs")[0].endswith(f"{str(task_id)[-12:]} queued ")
    assert f'href="/console/tasks/{task_id}"' in page
    assert '"region": "north"' in text
    assert "the last one is caught up" in text


def test_a_schedule_is_paused_with_a_reason_resumed_and_run_now(browser: TestClient, ledger: ServersOfTests) -> None:
    scheduled()
    place, said = sent(browser, POSTS[0], page=PATH, name=NAME, reason="the warehouse is moved")
    assert place == f"{PATH}#{NAME}"
    assert f"The schedule {NAME} is paused." in said
    assert "by console:ann: the warehouse is moved." in card(page_of(browser, PATH))
    (listed,) = manage("schedules", "--json").json
    assert (listed["state"], listed["pausedBy"], listed["pausedReason"]) == (
        "paused", "console:ann", "the warehouse is moved",
    )  # fmt: skip
    _, said = sent(browser, POSTS[2], page=PATH, name=NAME)
    ((task_id, context),) = rows("id, context")
    assert f"One task of the schedule {NAME} was submitted: {task_id}." in said
    assert context == {"schedule": NAME, "user": "console:ann"}
    move(ledger, 7200)
    _, said = sent(browser, POSTS[1], page=PATH, name=NAME)
    assert "is resumed; its next run is at 2026-11-18 10:00:00 UTC. Runs that were due" in said
    (listed,) = manage("schedules", "--json").json
    assert (listed["pausedBy"], listed["nextAt"]) == (None, "2026-11-18T10:00:00+00:00")


def test_the_state_says_why_a_schedule_does_not_run(
    browser: TestClient, reader: TestClient, ledger: ServersOfTests
) -> None:
    scheduled("test.gone", name="gone:1", catch_up="none")
    move(ledger, LIVE_SECONDS + 1)
    failing = scheduled("test.failing", queue="no-such-queue", name="another:3", schedule="* * * * *")
    scheduled("test.removed", name="another:4")
    registered(handler_of("test.removed"), name="another:5")
    for _ in range(2):
        move(ledger, 31)
        renew(failing)
    submit_due(engine())
    page = page_of(browser, PATH)
    assert "no worker No live worker has its handler. Missed runs are skipped." in card(page, "test.gone").replace(
        "Run now ", ""
    )
    assert "Its handler no longer has a schedule" in card(page, "test.removed")
    assert "Next run never" in card(page, "test.removed")
    (error,) = [each["error"] for each in manage("schedules", "--json").json if each["name"] == "test.failing"]
    assert error in card(page, "test.failing")
    assert "Its tasks cannot be submitted." in card(page_of(reader, PATH), "test.failing")
    assert error not in card(page_of(reader, PATH), "test.failing")


def test_an_unknown_schedule_is_refused_with_a_sentence(browser: TestClient) -> None:
    for path in POSTS:
        _, said = sent(browser, path, page=PATH, name="no\x00such")
        assert "There is no schedule" in said
    assert rows() == []


def test_a_reader_sees_no_form_and_no_words_of_operators_and_changes_nothing(
    browser: TestClient, reader: TestClient
) -> None:
    scheduled()
    with engine().begin() as connection:
        pause(connection, NAME, actor="op@db.internal", reason="a secret move")
    page = page_of(reader, PATH)
    assert "Paused since" in card(page)
    assert not [hidden for hidden in ("op@db.internal", "a secret move") if hidden in page]
    assert page.count("<form") == 2, "only the search and the logout"
    for path in POSTS:
        assert refuses_reader_and_foreigner(reader, browser, path, page=PATH)
    assert (manage("schedules", "--json").json[0]["state"], rows()) == ("paused", [])


def test_markup_in_names_payloads_and_words_is_escaped(browser: TestClient) -> None:
    scheduled(f"{XSS}", name=f"{XSS}:1", payload={"text": XSS})
    sent(browser, POSTS[0], page=PATH, name=XSS, reason=XSS)
    page = page_of(browser, PATH)
    assert page.count("onerror") > 5
    assert is_escaped(page)


def test_without_schedules_the_page_says_how_to_declare_one(browser: TestClient) -> None:
    assert "No worker has declared a schedule yet." in words(page_of(browser, PATH))


def test_a_visitor_without_a_scope_for_the_ledger_is_refused(ledger: ServersOfTests) -> None:
    assert logged_in(make_token("sue", Scope.TASKS_SUBMIT)).get(PATH).status_code == 403
