"""Pages that load themselves again: what a person does on them stays, and what is old says so."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, Route

from models.engine import engine
from models.sql import sql
from tests.api.server import Server
from tests.console.browser import Visit, chromium
from tests.console.task_pages import execute
from tests.servers import wait_until
from tests.tasks.command_line import submitted
from tests.tasks.deliveries import scalar

SCHEDULE = """
    INSERT INTO ledger.schedule (name, type, rule, timezone, catch_up, next_at)
    VALUES (:name, :name, '0 * * * *', 'UTC', 'once', ledger.ledger_now() + interval '1 hour')
"""
EVENT = "INSERT INTO ledger.outbox_event (destination, payload) VALUES ('orders', '{}') RETURNING id"
WAITING = "SELECT count(*) FROM pg_locks WHERE NOT granted"
PATH = "/console/schedules"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def visit(browser: Browser, server: Server) -> Iterator[Visit]:
    with Visit.begin(browser, server.port) as visit:
        visit.page.clock.install()  # so that no page waits before it is loaded again
        visit.log_in()
        yield visit
        assert visit.complaints == []


def add_schedules(*names: str) -> None:
    for name in names:
        execute(SCHEDULE, name=name)


def refresh(page: Page) -> None:
    """Let the page load itself again."""
    seconds = int(page.locator("[data-refresh]").get_attribute("data-refresh") or 0)
    with page.expect_response(lambda answer: answer.request.resource_type == "fetch") as answered:
        page.clock.run_for(1000 * seconds)
    answered.value.finished()


def test_an_open_form_and_the_focus_stay_with_their_thing_when_another_one_appears_before_it(visit: Visit) -> None:
    add_schedules("b", "d")
    visit.go(PATH)
    unit, button = visit.page.locator("section#b"), visit.page.get_by_role("button", name="Pause b", exact=True)
    unit.locator("summary").click()
    button.focus()
    add_schedules("a", "c")
    refresh(visit.page)
    visit.page.locator("section#c").wait_for()
    assert visit.page.locator("section.unit").evaluate_all("(found) => found.map((each) => each.id)") == list("abcd")
    assert visit.page.locator("details[open]").count() == 1
    assert unit.locator("details[open]").count() == 1
    assert visit.page.evaluate("document.activeElement.closest('section').id") == "b"
    visit.page.keyboard.press("Enter")
    visit.page.locator("section#b .note").wait_for()
    assert visit.page.get_by_text("The schedule b is paused.").is_visible()


def test_a_row_keeps_the_focus_when_it_moves_to_the_top(visit: Visit) -> None:
    first, second = submitted({}, {})
    visit.go("/console/tasks")
    execute("UPDATE ledger.ingest_task SET updated_at = updated_at + interval '1 hour' WHERE id = :id", id=second)
    refresh(visit.page)
    rows = visit.page.locator("tbody a.id")
    visit.page.wait_for_function("(id) => document.querySelector('tbody a.id').title === id", arg=str(second))
    visit.page.locator(f"a[title='{first}']").focus()
    execute("UPDATE ledger.ingest_task SET updated_at = updated_at + interval '2 hours' WHERE id = :id", id=first)
    refresh(visit.page)
    visit.page.wait_for_function("(id) => document.querySelector('tbody a.id').title === id", arg=str(first))
    assert rows.count() == 2
    assert visit.page.evaluate("document.activeElement.title") == str(first)


def test_what_is_closed_by_hand_is_not_opened_again_and_selected_text_stays_selected(visit: Visit) -> None:
    execute(EVENT)
    visit.go("/console/outbox")
    visit.page.locator("#event-list a.id, table a.id").first.click()
    fold = visit.page.locator("details.fold").first
    assert fold.get_attribute("open") is not None
    fold.locator("summary").click()
    visit.page.evaluate("""() => {
        const range = document.createRange();
        range.selectNodeContents(document.querySelector("dl.facts"));
        getSelection().addRange(range);
    }""")
    selected = visit.page.evaluate("getSelection().toString()")
    execute("UPDATE ledger.outbox_event SET created_at = created_at - interval '5 minutes', attempt_count = 7")
    refresh(visit.page)
    refresh(visit.page)
    assert fold.get_attribute("open") is None
    assert visit.page.evaluate("getSelection().toString()") == selected
    visit.page.evaluate("getSelection().removeAllRanges()")
    refresh(visit.page)
    visit.page.get_by_text("5 m ago").first.wait_for()


def test_a_page_says_that_it_is_old_while_the_server_does_not_answer(visit: Visit) -> None:
    add_schedules("b")
    visit.go(PATH)
    said = visit.page.get_by_text("The server does not answer")
    for how in ("fails", "is unreachable"):
        visit.page.route(
            f"**{PATH}", lambda route, how=how: route.fulfill(status=503) if how == "fails" else route.abort()
        )
        visit.page.clock.run_for(2000)
        said.wait_for()
        assert visit.page.locator(".page.stale").count() == 1
        visit.page.unroute(f"**{PATH}")
        refresh(visit.page)
        said.wait_for(state="detached")
        assert visit.page.locator(".page.stale").count() == 0
    visit.complaints.clear()  # of the answers above


def test_a_page_about_a_thing_that_is_gone_is_loaded_as_a_whole(visit: Visit) -> None:
    (id_,) = submitted({})
    visit.go(f"/console/tasks/{id_}")
    execute("DELETE FROM ledger.ingest_task WHERE id = :id", id=id_)
    visit.page.clock.run_for(2000)
    visit.page.get_by_text("it was never submitted, or it was pruned").wait_for()
    visit.complaints.clear()  # of the 404


def test_a_workflow_that_was_refused_stays_in_its_form(visit: Visit) -> None:
    visit.go("/console/workflows")
    visit.page.locator("summary", has_text="Submit a workflow").click()
    visit.page.get_by_label("The workflow as JSON").fill('{"stages": [], "workflowId": "order 17"}')
    visit.page.get_by_role("button", name="Submit").click()
    visit.page.locator(".complaint").wait_for()
    visit.page.clock.run_for(30_000)
    visit.page.wait_for_timeout(300)
    assert visit.page.locator(".complaint").is_visible()
    assert "order 17" in visit.page.get_by_label("The workflow as JSON").input_value()
    visit.complaints.clear()  # of the 400


def test_a_page_that_loads_itself_again_does_not_take_away_what_a_form_of_another_tab_has_said(visit: Visit) -> None:
    add_schedules("b")
    visit.go(PATH)
    token = visit.page.locator("[name=form_token]").first.get_attribute("value") or ""
    form: dict[str, str | float | bool] = {"form_token": token, "name": "b"}
    address = visit.page.url
    answer = visit.page.context.request.post(f"{address}/pause", form=form, max_redirects=0)
    assert answer.status == 303
    refresh(visit.page)
    visit.page.locator("section#b .note").wait_for()
    visit.go(PATH)
    assert visit.page.get_by_text("The schedule b is paused.").is_visible()
    visit.go(PATH)
    assert not visit.page.get_by_text("The schedule b is paused.").is_visible()


def test_a_button_that_is_pressed_twice_sends_its_form_once(visit: Visit) -> None:
    add_schedules("b")
    visit.go(PATH)
    sent: list[str] = []

    def answer_nothing(route: Route) -> None:
        sent.append(route.request.method)
        route.fulfill(status=204)

    visit.page.route(f"**{PATH}/run", answer_nothing)
    button = visit.page.get_by_role("button", name="Run b now")
    with visit.page.expect_request(f"**{PATH}/run"):
        button.dblclick()
    button.click()
    visit.page.clock.run_for(11_000)
    assert sent == ["POST"]
    with visit.page.expect_request(f"**{PATH}/run"):
        button.click()  # it can be sent again, because nothing came back


def test_a_double_click_submits_one_task_also_if_the_ledger_is_slow(visit: Visit) -> None:
    (id_,) = submitted({})
    visit.go(f"/console/tasks/{id_}/edit")
    box = visit.page.get_by_role("button", name="Submit the new task").bounding_box()
    assert box
    with engine().begin() as other:
        other.execute(sql("LOCK TABLE ledger.ingest_task IN SHARE MODE"))
        for _ in range(2):
            visit.page.mouse.click(box["x"] + 9, box["y"] + 9, delay=20)
            time.sleep(0.2)
        wait_until(lambda: scalar(WAITING) > 0, "the submit waits")
    visit.page.get_by_text("Submitted. This is the new task").wait_for()
    wait_until(lambda: scalar(WAITING) == 0, "no submit waits")
    assert scalar("SELECT count(*) FROM ledger.ingest_task") == 2
