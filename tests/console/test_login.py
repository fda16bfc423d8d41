"""Log in with a token: what begins a session, what ends it, and what it may see."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from fastapi.testclient import TestClient

from api import tokens
from api.tokens import Scope
from console import failed_logins, sessions
from models.engine import engine
from tests.api.callers import make_token
from tests.console.visits import LOGIN, hidden_fields, log_in, logged_in, visitor, words
from tests.models.moving_clock import move_clock
from tests.servers import ServersOfTests
from tests.tasks.deliveries import scalar


def revoke(name: str) -> None:
    with engine().begin() as connection:
        tokens.revoke(connection, name)


def test_without_a_session_every_page_leads_to_the_login(guest: TestClient) -> None:
    for path in ("/console", "/console?period=24h"):
        answer = guest.get(path)
        assert (answer.status_code, answer.headers["location"]) == (303, LOGIN)
    page = guest.get(LOGIN)
    assert page.status_code == 200
    assert re.search(r'<input[^>]* name="token"', page.text)


def test_a_token_opens_a_session_and_the_overview_says_whose_it_is(guest: TestClient) -> None:
    answer = log_in(guest, f"  {make_token('ann', Scope.OPERATE)} ")
    assert (answer.status_code, answer.headers["location"]) == (303, "/console")
    page = guest.get("/console")
    assert page.status_code == 200
    assert "ann" in words(page.text)
    assert guest.get(LOGIN).headers["location"] == "/console", "who is logged in need not do it again"


def test_a_wrong_token_opens_nothing_and_is_not_repeated(guest: TestClient) -> None:
    make_token("gone", Scope.OPERATE)
    for wrong in ("", "wrong-token", "celeriac_" + "A" * 43, "ü" * 20, "'; DROP TABLE"):
        answer = log_in(guest, wrong)
        assert answer.status_code == 403
        assert "This token is not valid" in words(answer.text)
        assert not wrong or wrong not in answer.text
    assert guest.get("/console").status_code == 303
    assert scalar("SELECT count(*) FROM ledger.console_session") == 0


def test_only_hashes_are_stored(guest: TestClient) -> None:
    secret = make_token("ann", Scope.OPERATE)
    log_in(guest, secret)
    session = next(value for name, value in guest.cookies.items() if value and "form" not in name)
    stored = scalar("SELECT CAST(array_agg(row_to_json(s)) AS text) FROM ledger.console_session s")
    assert sessions._sha(session).hex() in stored
    assert session not in stored
    assert secret not in stored


def test_revoking_the_token_ends_its_sessions_at_once_and_for_ever() -> None:
    browser = logged_in(make_token("ann", Scope.OPERATE))
    assert browser.get("/console").status_code == 200
    revoke("ann")
    assert browser.get("/console").status_code == 303
    make_token("ann", Scope.OPERATE)
    assert browser.get("/console").status_code == 303, "a new token of the same name is another one"


def test_a_session_ends_with_its_token_or_after_its_time(stack: ServersOfTests) -> None:
    short, long = make_token("short", Scope.OPERATE, expires_in=timedelta(hours=1)), make_token("long", Scope.OPERATE)
    browsers = [logged_in(short), logged_in(long)]

    def pages_after(hours: float) -> list[int]:
        with stack.cluster.superuser.begin() as superuser:
            move_clock(superuser, timedelta(hours=hours))
        return [browser.get("/console").status_code for browser in browsers]

    assert pages_after(0.9) == [200, 200]
    assert pages_after(0.2) == [303, 200]
    assert pages_after(sessions.SESSION_HOURS) == [303, 303]
    logged_in(long)
    assert scalar("SELECT count(*) FROM ledger.console_session") == 1, "the expired ones are deleted"


def test_logging_out_deletes_the_session() -> None:
    browser = logged_in(make_token("ann", Scope.OPERATE))
    fields = hidden_fields(browser.get("/console").text)
    cookies = dict(browser.cookies)
    answer = browser.post("/console/logout", data=fields)
    assert (answer.status_code, answer.headers["location"]) == (303, LOGIN)
    assert scalar("SELECT count(*) FROM ledger.console_session") == 0
    copy = visitor()
    copy.cookies.update(cookies)
    assert copy.get("/console").status_code == 303, "a copy of the cookie is worth nothing"


def test_logging_in_again_ends_the_session_before(guest: TestClient) -> None:
    log_in(guest, make_token("ann", Scope.OPERATE))
    page = guest.get(f"{LOGIN}?code=x")  # the page of a link is shown to those who are logged in, too
    guest.post(LOGIN, data={**hidden_fields(page.text), "code": "", "token": make_token("bob", Scope.OPERATE)})
    assert scalar("SELECT count(*) FROM ledger.console_session") == 1
    assert "bob" in words(guest.get("/console").text)


@pytest.mark.parametrize("scope", [Scope.OPERATE, Scope.TASKS_READ_ALL])
def test_scopes_that_see_all_tasks_see_the_overview(scope: Scope) -> None:
    assert logged_in(make_token("ann", scope)).get("/console").status_code == 200


def test_a_token_without_such_a_scope_is_told_which_one_is_missing_and_can_log_out() -> None:
    others = [scope for scope in Scope if scope not in (Scope.OPERATE, Scope.TASKS_READ_ALL)]
    page = logged_in(make_token("ann", *others)).get("/console")
    assert page.status_code == 403
    assert "The token ann lacks the scope operate or tasks:read-all." in words(page.text)
    assert "/console/logout" in page.text
    assert "Pipeline" not in page.text


def test_a_reader_has_no_button_but_the_one_that_logs_out() -> None:
    page = logged_in(make_token("reader", Scope.TASKS_READ_ALL)).get("/console").text
    assert re.findall(r"<form method=[^>]*>", page) == ['<form method="post" action="/console/logout">']
    assert re.findall(r"<button[^>]*>([^<]*)<", page) == ["Log out"]


def test_a_session_opens_no_route_of_the_api_and_a_bearer_token_no_page(guest: TestClient) -> None:
    token = make_token("ann", Scope.OPERATE)
    headers = {"Authorization": f"Bearer {token}"}
    assert guest.get("/console", headers=headers).status_code == 303
    browser = logged_in(token)
    assert browser.get("/internal/tasks/stats").status_code == 401
    assert browser.get("/internal/tasks/stats", headers=headers).status_code == 200


def test_after_many_failures_a_caller_waits_a_minute(guest: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = make_token("ann", Scope.OPERATE)
    for _ in range(failed_logins.MOST_FAILURES):
        assert log_in(guest, "wrong").status_code == 403
    refused = log_in(guest, secret)
    assert refused.status_code == 429
    assert "Wait a minute" in words(refused.text)
    other = TestClient(guest.app, client=("192.0.2.7", 1), follow_redirects=False)
    assert log_in(other, secret).status_code == 303, "other callers are not concerned"
    monkeypatch.setattr(failed_logins, "WINDOW_SECONDS", 0.0)
    assert log_in(guest, secret).status_code == 303
