"""Log in with a link: it works once, for ten minutes, and leaves no trace in logs."""

from __future__ import annotations

import logging
from datetime import timedelta
from urllib.parse import urlsplit

import pytest
from fastapi.testclient import TestClient

import settings
from api import tokens
from api.tokens import Scope
from console import sessions
from console.links import console_address, new_link
from models.engine import engine
from tests.api.callers import make_token
from tests.api.server import Server
from tests.console.visits import LOGIN, hidden_fields, visitor, words
from tests.models.moving_clock import move_clock
from tests.servers import ServersOfTests
from tests.tasks.command_line import manage
from tests.tasks.deliveries import scalar
from tests.tasks.web import get

EVERY_PAGE = {*(Scope.OPERATE, Scope.TASKS_SUBMIT, Scope.DOCUMENTS_READ, Scope.DOCUMENTS_WRITE, Scope.WORKFLOWS_SUBMIT)}


def link(token_name: str | None = None) -> str:
    """Return the path of a new link."""
    parts = urlsplit(new_link(settings.current(), token_name))
    return f"{parts.path}?{parts.query}"


def use(browser: TestClient, path: str) -> int:
    """Load a link and press its button."""
    return int(browser.post(LOGIN, data=hidden_fields(browser.get(path).text)).status_code)


def test_a_link_logs_in_when_its_button_is_pressed_and_only_once(guest: TestClient) -> None:
    path = link()
    for _ in range(3):  # previews, and a user who loads the page again
        page = guest.get(path)
        assert page.status_code == 200
        assert "logs you in once" in words(page.text)
    assert use(guest, path) == 303
    assert guest.get("/console").status_code == 200
    thief = visitor()
    assert use(thief, path) == 403
    assert thief.get("/console").status_code == 303


def test_an_expired_link_says_so(guest: TestClient, stack: ServersOfTests) -> None:
    path = link()
    with stack.cluster.superuser.begin() as superuser:
        move_clock(superuser, timedelta(minutes=sessions.LINK_MINUTES))
    page = guest.post(LOGIN, data=hidden_fields(guest.get(path).text))
    assert page.status_code == 403
    assert "it works once, for ten minutes" in words(page.text)
    link()
    assert scalar("SELECT count(*) FROM ledger.console_link") == 1, "expired links are deleted"


def test_links_belong_to_a_token_that_may_use_every_page_and_can_be_revoked(guest: TestClient) -> None:
    with engine().connect() as connection:
        assert tokens.list_tokens(connection) == []
    assert use(guest, link()) == 303
    link()
    with engine().begin() as connection:
        (made,) = tokens.list_tokens(connection)
        assert (made.name, set(made.scopes), made.state) == ("console", EVERY_PAGE, "active")
        tokens.revoke(connection, "console")
    assert guest.get("/console").status_code == 303
    assert use(guest, link()) == 303, "the next link creates it again"


def test_a_link_of_a_token_that_was_revoked_meanwhile_does_not_log_in(guest: TestClient) -> None:
    make_token("ann", Scope.OPERATE)
    path = link("ann")
    with engine().begin() as connection:
        tokens.revoke(connection, "ann")
    assert use(guest, path) == 403


def test_the_command_prints_a_link_for_any_token(guest: TestClient) -> None:
    make_token("reader", Scope.TASKS_READ_ALL)
    done = manage("console", "link", "--token", "reader", "--json")
    address = done.json["link"]
    assert address.startswith(f"{console_address(settings.current())}/login?code=")
    assert use(guest, address.partition("8000")[2]) == 303
    assert "reader" in words(guest.get("/console").text)
    plain = manage("console", "link")
    assert plain.out.count("\n") == 1
    assert "once, within 10 minutes" in plain.err
    unknown = manage("console", "link", "--token", "unknown")
    assert (unknown.code, unknown.out) == (2, "")
    assert "no valid token 'unknown'" in unknown.err


def test_the_address_is_that_of_the_running_stack_or_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for variables, expected in (
        ({}, "http://127.0.0.1:8000/console"),
        ({"API_PORT": "8100"}, "http://127.0.0.1:8100/console"),
        ({"API_HOST": "0.0.0.0"}, "http://127.0.0.1:8000/console"),
        ({"API_HOST": "::1"}, "http://[::1]:8000/console"),
    ):
        with pytest.MonkeyPatch.context() as here:
            for name, value in variables.items():
                here.setenv(name, value)
            settings.current.cache_clear()
            assert console_address(settings.current()) == expected
    settings.current.cache_clear()
    home = settings.current()
    monkeypatch.setattr(type(home), "stack", {"API_URL": "http://10.0.0.5:9000"})
    assert console_address(home) == "http://10.0.0.5:9000/console"


def test_the_code_is_not_in_the_access_log(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    path = link()
    with caplog.at_level(logging.INFO, logger="uvicorn.access"):
        status, page = get(server.port, path)
    assert status == 200
    assert path.partition("=")[2] in page
    lines = [record.getMessage() for record in caplog.records if record.name == "uvicorn.access"]
    assert any("/console/login" in line for line in lines), "the request is logged"
    assert not any(path.partition("=")[2] in line for line in lines)
