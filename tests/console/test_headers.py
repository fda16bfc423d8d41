"""Headers and cookies: every answer is protected, and everything a page loads comes from this server."""

from __future__ import annotations

import re
from http.cookies import SimpleCookie

import pytest
from fastapi.testclient import TestClient

from api.tokens import Scope
from console import static_files
from tests.api.callers import make_token
from tests.console.visits import LOGIN, hidden_fields, log_in, logged_in, visitor

PATHS = (
    "/console",
    "/console?period=30d",
    LOGIN,
    f"{LOGIN}?code=x",
    "/console/logout",
    "/console/nothing",
    "/console/",
    "/console/static/console.css",
    "/console/static/console.js",
    "/console/static/icon.svg",
    "/console/static/..%2fapp.py",
    "/console/static/secrets.json",
)
POLICY = {
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self'",
    "connect-src 'self'",
    "form-action 'self'",
    "frame-ancestors 'none'",
    "base-uri 'none'",
}


@pytest.mark.parametrize("path", PATHS)
def test_every_answer_has_the_policy_and_no_script_or_style_inside(path: str, guest: TestClient) -> None:
    for browser in (guest, logged_in(make_token("ann", Scope.OPERATE))):
        answer = browser.get(path)
        assert set(answer.headers["content-security-policy"].split("; ")) == POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "same-origin"
        is_file = "console.c" in path or "console.j" in path or "icon" in path
        assert answer.headers["cache-control"] == (static_files.CACHE if is_file else "no-store")
        if answer.headers.get("content-type", "").startswith("text/html"):
            assert not re.search(r"<style|<script(?! src=)|\sstyle=|\son\w+=|javascript:", answer.text)


@pytest.mark.parametrize("path", ["/console/nothing", "/console/", "/console/static/secrets.json", "/consoles"])
def test_what_does_not_exist_is_not_found(path: str, guest: TestClient) -> None:
    answer = guest.get(path)
    if path == "/consoles":
        assert answer.status_code == 401, "it is not the console's"
    else:
        assert (answer.status_code, answer.headers["content-type"]) == (404, "text/html; charset=utf-8")


def test_every_file_that_a_page_names_is_served_with_its_type(guest: TestClient) -> None:
    page = logged_in(make_token("ann", Scope.OPERATE)).get("/console").text
    files = set(re.findall(r'(?:src|href)="(/console/static/[^"]+)"', page))
    assert {each.rpartition("/")[2].partition("?")[0] for each in files} == set(static_files.MEDIA_TYPES)
    for each in files:
        answer = guest.get(each)
        kind = static_files.MEDIA_TYPES[each.rpartition("/")[2].partition("?")[0]]
        assert (answer.status_code, answer.headers["content-type"].partition(";")[0]) == (200, kind)
    assert not re.search(r'(?:src|href|action)="(?!/console|#)', page), "nothing comes from elsewhere"


@pytest.mark.parametrize(("scheme", "is_secure"), [("http", False), ("https", True)])
def test_the_cookie_is_for_this_console_only(scheme: str, is_secure: bool) -> None:
    browser = TestClient(visitor().app, base_url=f"{scheme}://ops.example:8443", follow_redirects=False)
    answer = log_in(browser, make_token("ann", Scope.OPERATE))
    cookies = SimpleCookie()
    for each in answer.headers.get_list("set-cookie"):
        cookies.load(each)
    session = cookies["celeriac_console_8443"]
    assert len(session.value) == 43
    assert (session["path"], session["samesite"], session["httponly"]) == ("/console", "strict", True)
    assert bool(session["secure"]) is is_secure
    assert session["domain"] == ""
    assert cookies["celeriac_console_form_8443"]["max-age"] == "0"


def test_two_installations_on_one_host_do_not_log_each_other_out(guest: TestClient) -> None:
    first = TestClient(guest.app, base_url="http://localhost:8000", follow_redirects=False)
    log_in(first, make_token("ann", Scope.OPERATE))
    second = TestClient(guest.app, base_url="http://localhost:8100", cookies=first.cookies, follow_redirects=False)
    assert second.get("/console").status_code == 303
    page = second.get(LOGIN)
    second.post(LOGIN, data={**hidden_fields(page.text), "token": make_token("bob", Scope.OPERATE)})
    assert (first.get("/console").status_code, second.get("/console").status_code) == (200, 200)
