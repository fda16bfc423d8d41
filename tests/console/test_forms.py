"""Every form is refused unless a page of this console sent it, with the token of this session."""

from __future__ import annotations

import itertools

import pytest
from fastapi.testclient import TestClient

from api.tokens import Scope
from console.app import FORM_LIMIT
from tests.api.callers import make_token
from tests.console.all_pages import GETS, LOGOUT, POSTS, address
from tests.console.visits import LOGIN, hidden_fields, logged_in, visitor, words
from tests.console.written_ledger import Written, write_everywhere
from tests.tasks.deliveries import scalar

# What a page answers to a form that has a valid token and no other field. The others lead to a page.
ACCEPTED: dict[str, int] = {
    "/console/bulk": 400,
    "/console/receipts": 200,
    "/console/tasks/{id}/edit": 422,
    "/console/workflows": 400,
}
FOREIGN: list[dict[str, str]] = [
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://testserver.evil.example"},
    {"Origin": "http://testserver:81"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "none"},
]
OWN = {"Origin": "http://testserver", "Sec-Fetch-Site": "same-origin"}
numbers = itertools.count()
# Everything that a form can change.
STATE = """
    SELECT concat_ws(' ',
        (SELECT count(*) FROM ledger.console_session),
        (SELECT string_agg(status, ' ' ORDER BY id) FROM ledger.ingest_task),
        (SELECT count(*) FROM ledger.task_audit),
        (SELECT count(*) FROM ledger.queue_pause), (SELECT count(*) FROM ledger.queue_scale),
        (SELECT count(*) FROM ledger.schedule WHERE paused), (SELECT count(*) FROM ledger.dead_mute),
        (SELECT count(*) FROM ledger.outbox_event WHERE status = 'DEAD'), (SELECT count(*) FROM ledger.outbox_audit),
        (SELECT string_agg(state, ' ' ORDER BY gid) FROM ledger.sink_transaction),
        (SELECT count(*) FROM ledger.document),
        (SELECT string_agg(state, ' ' ORDER BY id) FROM ledger.bulk_action))
"""


@pytest.fixture
def browser() -> TestClient:
    return logged_in(make_token("ann"))


@pytest.fixture
def written(browser: TestClient) -> Written:
    return write_everywhere("a.type")


def fields_of(browser: TestClient, path: str) -> dict[str, str]:
    """Return valid fields for a form."""
    fields = hidden_fields(browser.get(f"{LOGIN}?code=x" if path == LOGIN else "/console").text)
    return (
        {**fields, "token": make_token(f"bob{next(numbers)}", Scope.OPERATE), "code": ""} if path == LOGIN else fields
    )


def test_the_list_of_forms_is_complete(written: Written) -> None:
    assert {LOGIN, LOGOUT} < set(POSTS)
    assert len(POSTS) == len(set(POSTS)) >= 21, "the routes of the console are found"
    assert all("{" not in address(path, written) for path in POSTS)
    assert set(ACCEPTED) < set(POSTS)


def test_a_form_of_another_site_is_refused_even_with_the_right_token(browser: TestClient, written: Written) -> None:
    for path in POSTS:
        fields, to, before = fields_of(browser, path), address(path, written), scalar(STATE)
        for headers in FOREIGN:
            assert browser.post(to, data=fields, headers=headers).status_code == 403, (path, headers)
        assert scalar(STATE) == before, path
        assert browser.post(to, data=fields, headers=OWN).status_code == ACCEPTED.get(path, 303), path


def test_a_form_without_the_token_of_the_session_is_refused(browser: TestClient, written: Written) -> None:
    for path in POSTS:
        fields, to = fields_of(browser, path), address(path, written)
        other = logged_in(make_token(f"eve{POSTS.index(path)}"))
        stolen = fields_of(other, path)["form_token"]
        other.post(LOGOUT, data=fields_of(other, LOGOUT))
        before = scalar(STATE)
        for wrong in (None, "", "x", "é", stolen):
            changed = {name: value for name, value in {**fields, "form_token": wrong}.items() if value is not None}
            assert browser.post(to, data=changed).status_code == 403, (path, wrong)
        assert scalar(STATE) == before, path


def test_a_form_without_a_session_leads_to_the_login_and_changes_nothing(browser: TestClient, written: Written) -> None:
    fields, before = fields_of(browser, LOGOUT), scalar(STATE)
    for path in POSTS:
        if path != LOGIN:
            answer = visitor().post(address(path, written), data=fields)
            assert (answer.status_code, answer.headers["location"]) == (303, LOGIN), path
    assert scalar(STATE) == before


def test_a_form_cannot_be_sent_as_a_link(browser: TestClient, written: Written) -> None:
    fields, before = fields_of(browser, LOGOUT), scalar(STATE)
    for path in POSTS:
        answer = browser.get(address(path, written), params=fields)
        is_page = path in GETS
        assert answer.status_code in ((200, 303) if is_page else (404, 405)), path
    assert scalar(STATE) == before
    assert browser.get(LOGOUT).status_code == 405


def test_a_file_in_the_place_of_the_token_and_too_many_fields_are_refused(browser: TestClient) -> None:
    assert browser.post(LOGOUT, files={"form_token": ("x", b"x")}).status_code == 400
    assert browser.post(LOGOUT, data={f"f{n}": "x" for n in range(1000)}).status_code == 400
    assert browser.post(LOGOUT, content=b"x" * (FORM_LIMIT + 1)).status_code == 413
    assert scalar("SELECT count(*) FROM ledger.console_session") == 1


def test_the_login_form_needs_the_cookie_that_came_with_it() -> None:
    fields = hidden_fields(visitor().get(LOGIN).text)
    answer = visitor().post(LOGIN, data={**fields, "token": make_token("ann", Scope.OPERATE)})
    assert answer.status_code == 403
    assert "Please log in again" in words(answer.text)
    assert scalar("SELECT count(*) FROM ledger.console_session") == 0


def test_the_login_form_of_an_earlier_tab_stays_valid(guest: TestClient) -> None:
    first = hidden_fields(guest.get(LOGIN).text)
    guest.get(LOGIN)
    assert guest.post(LOGIN, data={**first, "token": make_token("ann", Scope.OPERATE)}).status_code == 303
