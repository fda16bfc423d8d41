"""Fill in and send the form of bulk actions, as a browser does."""

from __future__ import annotations

import re
import uuid
from html import unescape
from typing import Any
from urllib.parse import urlencode

from fastapi.testclient import TestClient

from tests.console.forms import page_of
from tests.console.visits import words
from tests.tasks.deliveries import scalar

HOME = "/console/bulk"


def form_of(q: str = "status:dead", action: str = "requeue") -> str:
    return f"{HOME}/new?{urlencode({'action': action, 'q': q})}"


def fields_of(page: str) -> dict[str, str]:
    """Return the fields that the form sends, as the browser would without a touch."""
    form = re.search(r'<form method="post" action="/console/bulk" .*?</form>', page, re.DOTALL)
    assert form, words(page)
    found = {}
    for tag in re.findall(r"<input [^>]*>", form[0]):
        attributes = {name: unescape(value) for name, value in re.findall(r'([\w-]+)="([^"]*)"', tag)}
        if attributes.get("type") != "checkbox" or tag.endswith(" checked>"):
            found[attributes["name"]] = attributes["value"]
    return found


def sent_form(browser: TestClient, page: str, **typed: str) -> Any:
    """Send the form of a page after typing into it."""
    return browser.post(HOME, data={**fields_of(page), **typed})


def started(browser: TestClient, form: str, **typed: str) -> uuid.UUID:
    """Start an action as an operator does, and return its id."""
    page = page_of(browser, form)
    answer = sent_form(browser, page, **{"reason": "the bank is open again", "confirmation": "requeue", **typed})
    assert answer.status_code == 303, words(answer.text)
    place = answer.headers["location"]
    assert place.startswith(f"{HOME}/")
    return uuid.UUID(place.rpartition("/")[2])


def refused(browser: TestClient, form: str, **typed: str) -> str:
    """Send a form that is refused, and return the page that follows."""
    answer = sent_form(browser, page_of(browser, form), **{"reason": "a reason", "confirmation": "requeue", **typed})
    assert answer.status_code == 422, words(answer.text)
    assert scalar("SELECT count(*) FROM ledger.bulk_action") == 0
    return str(answer.text)
