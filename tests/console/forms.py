"""Send the forms of the console's pages, as a browser does."""

from __future__ import annotations

from fastapi.testclient import TestClient

from console.visitors import FORM_FIELD
from tests.console.visits import hidden_fields, words

XSS = "<img src=x onerror=alert(1)>\"'><script>alert(1)</script>&amp;"


def page_of(browser: TestClient, path: str) -> str:
    """Return the HTML of a page."""
    answer = browser.get(path)
    assert answer.status_code == 200, words(answer.text)
    return str(answer.text)


def sent(browser: TestClient, path: str, *, page: str, **fields: str) -> tuple[str, str]:
    """Send a form from a page; return where the browser goes next, and the words of that page."""
    token = hidden_fields(page_of(browser, page))[FORM_FIELD]
    answer = browser.post(path, data={FORM_FIELD: token, **fields})
    assert answer.status_code == 303, words(answer.text)
    place = answer.headers["location"]
    return place, words(page_of(browser, place.partition("#")[0]))


def is_escaped(page: str) -> bool:
    """Return whether a page shows the markup of XSS, and has it nowhere as markup."""
    return "onerror" in page and "<img" not in page.replace('<img src="/console/static/', "") and "<script>" not in page


def refuses_reader_and_foreigner(reader: TestClient, operator: TestClient, path: str, *, page: str) -> bool:
    """Return whether a form is refused for a reader, and for an operator without the token of the form."""
    token = hidden_fields(page_of(reader, page))[FORM_FIELD]
    by_reader = reader.post(path, data={FORM_FIELD: token})
    return (by_reader.status_code, operator.post(path, data={}).status_code) == (403, 403)
