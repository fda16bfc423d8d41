"""Every form is refused unless a page of this console sent it, with the token of this session."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient
from starlette.routing import Route

from api.tokens import Scope
from console.app import FORM_LIMIT, console
from tests.api.callers import make_token
from tests.console.visits import LOGIN, hidden_fields, logged_in, visitor, words
from tests.tasks.deliveries import scalar

POSTS = [route.path for route in console.routes if isinstance(route, Route) and "POST" in (route.methods or ())]
FOREIGN: list[dict[str, str]] = [
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://testserver.evil.example"},
    {"Origin": "http://testserver:81"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "none"},
]


@pytest.fixture
def browser() -> TestClient:
    return logged_in(make_token("ann", Scope.OPERATE))


def fields_of(browser: TestClient, path: str) -> dict[str, str]:
    """Return valid fields for a form."""
    return hidden_fields(browser.get(f"{LOGIN}?code=x" if path == LOGIN else "/console").text)


def refused(answer: Any) -> bool:
    assert answer.status_code == 403, answer.text
    return bool(scalar("SELECT count(*) FROM ledger.console_session") == 1)


def test_the_list_of_forms_is_complete() -> None:
    assert POSTS == [LOGIN, "/console/logout"]


@pytest.mark.parametrize("path", POSTS)
def test_a_form_of_another_site_is_refused_even_with_the_right_token(path: str, browser: TestClient) -> None:
    fields = {**fields_of(browser, path), "token": make_token("bob", Scope.OPERATE), "code": ""}
    for headers in FOREIGN:
        assert refused(browser.post(path, data=fields, headers=headers)), headers
    own = {"Origin": "http://testserver", "Sec-Fetch-Site": "same-origin"}
    assert browser.post(path, data=fields, headers=own).status_code == 303


@pytest.mark.parametrize("path", POSTS)
def test_a_form_without_the_token_of_the_session_is_refused(path: str, browser: TestClient) -> None:
    fields = {**fields_of(browser, path), "token": make_token("bob", Scope.OPERATE), "code": ""}
    other = logged_in(make_token("eve", Scope.OPERATE))
    stolen = fields_of(other, path)["form_token"]
    other.post("/console/logout", data=fields_of(other, "/console/logout"))
    for wrong in (None, "", "x", "é", stolen):
        changed = {name: value for name, value in {**fields, "form_token": wrong}.items() if value is not None}
        assert refused(browser.post(path, data=changed)), wrong


def test_a_file_in_the_place_of_the_token_and_too_many_fields_are_refused(browser: TestClient) -> None:
    assert browser.post("/console/logout", files={"form_token": ("x", b"x")}).status_code == 400
    assert browser.post("/console/logout", data={f"f{n}": "x" for n in range(1000)}).status_code == 400
    assert browser.post("/console/logout", content=b"x" * (FORM_LIMIT + 1)).status_code == 413
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


def test_a_form_cannot_be_sent_as_a_link(browser: TestClient) -> None:
    assert browser.get("/console/logout").status_code == 405
