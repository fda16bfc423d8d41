"""Read the page of a task, and bring tasks into the state that it is to show."""

from __future__ import annotations

import re

from fastapi.testclient import TestClient

from models.engine import engine
from models.sql import sql
from tests.api.callers import FLAKY
from tests.console.forms import page_of
from tests.console.visits import words
from tests.tasks.registrations import handler_of, registered


def execute(statement: str, **values: object) -> None:
    with engine().begin() as connection:
        connection.execute(sql(statement), values)


def shown(browser: TestClient, task_id: object) -> str:
    return page_of(browser, f"/console/tasks/{task_id}")


def reasons(page: str) -> dict[str, str]:
    """Return the sentence of each reason, and the address of the link that helps."""
    part = page.partition('id="why-title"')[2].partition("</section>")[0]
    found = re.findall(r'<li class="(\w+)">(.*?)</li>', part, re.DOTALL)
    return {code: " ".join([words(html), *re.findall(r'(?:href|action)="([^"]+)"', html)]) for code, html in found}


def hops(page: str) -> dict[str, str]:
    """Return the state of each hop of the custody line, and its sentence."""
    found = re.findall(r'<li class="hop (\w+)">\s*<h3>(\w+) <small>.*?</h3>\s*<p>(.*?)</p>', page, re.DOTALL)
    return {name: f"{state}: {words(sentence)}" for state, name, sentence in found}


def consumed(type: str = FLAKY, queue: str = "ingest") -> None:
    """Register a worker that knows the type and consumes the queue, and no other."""
    registered(handler_of(type), name="web-1:41-worker", consumed=(queue,))
