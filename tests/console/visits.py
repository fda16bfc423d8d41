"""Visit the console with a client that keeps cookies, as a browser does, and submit its forms."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

from fastapi.testclient import TestClient

from api.app import app

LOGIN = "/console/login"


def visitor() -> TestClient:
    """Return a new browser without cookies. Redirects are shown, not followed."""
    return TestClient(app, raise_server_exceptions=False, follow_redirects=False)


def hidden_fields(page: str) -> dict[str, str]:
    """Return the hidden fields of the first form of a page that changes something."""
    form = re.search(r'<form method="post".*?</form>', page, re.DOTALL)
    assert form, page
    found = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', form[0])
    return {name: unescape(value) for name, value in found}


def log_in(browser: TestClient, token: str) -> Any:
    """Log in as a user does: load the page, and send its form."""
    fields = hidden_fields(browser.get(LOGIN).text)
    return browser.post(LOGIN, data={**fields, "token": token})


def logged_in(token: str) -> TestClient:
    browser = visitor()
    answer = log_in(browser, token)
    assert (answer.status_code, answer.headers["location"]) == (303, "/console"), answer.text
    return browser


def words(page: str) -> str:
    """Return the text of a page, as a person reads it."""
    body = re.sub(r"<(script|style)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", body)).split())


def figures(page: str) -> dict[str, str]:
    """Return what the picture for wide screens shows for each status."""
    return dict(re.findall(r'data-status="(\w+)">([^<]*)<', page.partition('class="pipeline down"')[0]))
