"""The form of bulk actions: a preview, and nothing happens without a typed confirmation."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
from fastapi.testclient import TestClient

import settings
from api.tokens import Scope
from models.bulk_actions import BulkVerb
from models.engine import engine
from models.sql import sql
from tasks.operations import bulk_statements
from tests.api.callers import FLAKY, make_token
from tests.console.bulk_forms import HOME, fields_of, form_of, refused, sent_form, started
from tests.console.forms import page_of
from tests.console.visits import logged_in, words
from tests.servers import ServersOfTests
from tests.tasks.bulk import row, worked_off
from tests.tasks.command_line import buried, statuses, submitted
from tests.tasks.deliveries import change, scalar


@pytest.fixture
def browser(ledger: ServersOfTests) -> TestClient:
    return logged_in(make_token("ann", Scope.OPERATE))


def test_the_preview_counts_by_status_type_and_error(browser: TestClient) -> None:
    buried(1200, error_code="timeout", error_message="It took 7 s.")
    buried(3, type="mail.send")
    submitted({})
    page = page_of(browser, form_of())
    text = words(page)
    assert "1,203 tasks match" in text
    assert "1,200 dead demo.flaky timeout for example: It took 7 s." in text
    assert "3 dead mail.send handler_error for example: no" in text
    assert "Type the number of tasks, 1203 , or the word requeue ." in text
    assert "/console/tasks?q=status%3Adead" in page
    assert "1,204 tasks match" in words(page_of(browser, form_of("", "discard")))
    assert scalar("SELECT count(*) FROM ledger.bulk_action") == 0


def test_a_search_that_matches_nothing_offers_no_button(browser: TestClient) -> None:
    submitted({})
    for path in (form_of(), form_of("id:00000000-0000-0000-0000-000000000000"), f"{HOME}/new"):
        page = page_of(browser, path)
        assert "No task would be requeued" in words(page)
        assert 'action="/console/bulk"' not in page


def test_a_search_that_cannot_be_read_is_explained_and_can_be_corrected(browser: TestClient) -> None:
    answer = browser.get(form_of("statos:dead"))
    assert answer.status_code == 422
    assert "statos" in words(answer.text)
    assert 'name="q" value="statos:dead"' in answer.text
    assert 'action="/console/bulk"' not in answer.text
    assert browser.get(f"{HOME}/new?action=delete&q=").status_code == 400


def test_words_without_a_name_are_shown_as_they_are_understood(browser: TestClient) -> None:
    buried(1, error_message="no such file")
    assert 'name="q" value="text:&#34;such file&#34;"' in page_of(browser, form_of("such file"))


@pytest.mark.guarantee
@pytest.mark.parametrize("typed", ["", "yes", "REQUEUE!", "discard", "1", "0", "3 tasks"])
def test_nothing_is_changed_without_the_typed_confirmation(browser: TestClient, typed: str) -> None:
    ids = buried(3)
    page = refused(browser, form_of(), confirmation=typed, per_second="7.5", canary="2", reset_steps="1")
    assert "Nothing was changed: type 3 or requeue to confirm." in words(page)
    kept = {"reason": "a reason", "per_second": "7.5", "canary": "2", "reset_steps": "1", "confirmation": typed}
    fields = fields_of(page)
    assert {name: fields[name] for name in kept} == kept
    assert set(statuses(ids)) == {"DEAD"}


@pytest.mark.parametrize("typed", ["1,203", "1203", " Requeue "])
def test_the_number_or_the_word_confirms(browser: TestClient, typed: str) -> None:
    buried(1203)
    action = row(started(browser, form_of(), confirmation=typed))
    assert (action.state, action.query, action.reason) == ("waiting", "status:dead", "the bank is open again")
    assert (action.verb, action.actor) == (BulkVerb.REQUEUE, "console:ann")


def test_the_number_does_not_confirm_what_was_not_counted_to_the_end(
    browser: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    buried(30)
    monkeypatch.setattr(bulk_statements, "COUNT_CEILING", 10)
    page = page_of(browser, form_of())
    assert "At least 10 tasks match" in words(page)
    assert "Nothing was changed: type requeue to confirm." in words(refused(browser, form_of(), confirmation="10"))
    assert row(started(browser, form_of())).state == "waiting"
    assert worked_off().changed == 30


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        ({"reason": " "}, "Give a reason of at most 500 characters."),
        ({"per_second": "fast"}, "must be numbers"),
        ({"per_second": "-1"}, "The rate must be between"),
        ({"per_second": "nan"}, "The rate must be between"),
        ({"canary": "few"}, "must be numbers"),
        ({"canary": "101"}, "There can be 1 to 100 canaries."),
        ({"canary": "5", "canary_seconds": "0"}, "Wait for canaries between one second and 60 minutes."),
        ({"as_of": "yesterday"}, "Load the page again."),
        ({"as_of": "2026-11-16T10:30:00"}, "Load the page again."),
        ({"id": "1"}, "must be numbers"),
    ],
)
def test_a_value_that_cannot_be_used_is_explained_and_kept(
    browser: TestClient, typed: dict[str, str], why: str
) -> None:
    buried(3)
    page = refused(browser, form_of(), **typed)
    assert why in words(page)
    kept = {name: value for name, value in typed.items() if name not in ("as_of", "id", "reason")}
    assert {name: fields_of(page)[name] for name in kept} == kept


def test_the_options_are_written_down(browser: TestClient) -> None:
    buried(3)
    typed = {"per_second": "2.5", "canary": "2", "canary_seconds": "", "reset_steps": "1"}
    action = row(started(browser, form_of(), **typed))
    assert (action.per_second, action.canary, action.canary_seconds) == (2.5, 2, 60)
    assert (action.reset_steps, action.accept_duplicates) == (True, False)


def test_a_discard_has_no_canary_and_a_run_now_no_steps(browser: TestClient) -> None:
    buried(2)
    submitted({}, {}, run_at=timedelta(hours=1))
    discard, run_now = page_of(browser, form_of("", "discard")), page_of(browser, form_of("", "run-now"))
    assert "canary" not in fields_of(discard)
    assert "canary" in fields_of(run_now)
    assert "reset_steps" not in discard + run_now
    id_ = started(browser, form_of("", "discard"), confirmation="discard")
    assert (worked_off().changed, row(id_).verb) == (4, BulkVerb.DISCARD)


def test_a_form_that_is_sent_twice_starts_one_action(browser: TestClient) -> None:
    buried(3)
    page = page_of(browser, form_of())
    answers = [sent_form(browser, page, reason="r", confirmation="3") for _ in range(2)]
    assert len({answer.headers["location"] for answer in answers}) == 1
    assert scalar("SELECT count(*) FROM ledger.bulk_action") == 1


@pytest.mark.guarantee
def test_tasks_that_die_between_the_preview_and_the_form_are_left_as_they_are(browser: TestClient) -> None:
    ids = buried(3)
    page = page_of(browser, form_of("status:dead since:2h"))
    late = buried(2)
    assert sent_form(browser, page, reason="r", confirmation="3").status_code == 303
    assert worked_off().changed == 3
    assert statuses([*ids, *late]) == ["QUEUED"] * 3 + ["DEAD"] * 2


def test_a_form_whose_tasks_have_all_changed_is_refused(browser: TestClient) -> None:
    (id_,) = buried(1)
    page = page_of(browser, form_of())
    change(id_, "status = 'DISCARDED'")
    answer = sent_form(browser, page, reason="r", confirmation="1")
    assert answer.status_code == 422
    assert "those that matched have changed since the preview" in words(answer.text)


def test_tasks_whose_sinks_have_forgotten_them_are_left_out_unless_duplicates_are_accepted(
    browser: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"url": "postgresql://me@127.0.0.1:1/none", "guarantee": "keyed", "key_life_hours": 48}
    monkeypatch.setenv("SINKS", json.dumps({"place": place}))
    settings.current.cache_clear()
    with engine().begin() as connection:
        connection.execute(sql(f"INSERT INTO ledger.sink_use (type, sink) VALUES ('{FLAKY}', 'place')"))
    young, old = buried(1)[0], buried(1)[0]
    assert "left out" not in words(page_of(browser, form_of()))
    change(old, "created_at = created_at - interval '49 hours'")
    assert "1 task of these is left out" in words(page_of(browser, form_of()))
    assert "Accept that effects may happen twice" in words(refused(browser, form_of(f"id:{old}")))
    id_ = started(browser, form_of())
    worked_off()
    assert statuses([young, old]) == ["QUEUED", "DEAD"]
    assert "Left out 1" in words(page_of(browser, f"{HOME}/{id_}"))
    started(browser, form_of(), accept_duplicates="1")
    worked_off()
    assert statuses([old]) == ["QUEUED"]
