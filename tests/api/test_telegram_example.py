"""The code of docs/api.md receives updates of Telegram, and makes one task of an update and its repetitions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import text

import settings
from models.engine import engine
from tasks.core import registry
from tasks.execution.deliver import deliver
from tests.api.examples import PAGE
from tests.servers import ServersOfTests
from tests.tasks.work import rows

SECRET = "X-Telegram-Bot-Api-Secret-Token"
UPDATE = {"update_id": 17, "message": {"text": "Buy milk", "chat": {"id": 5}}}


@pytest.fixture
def telegram(stack: ServersOfTests, database: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    """Run the code of the page: your handler, and your application as Telegram sees it."""
    monkeypatch.setenv("DATABASE_URL", f"{database}?options=-csearch_path%3Dpublic")  # the tests have an empty one
    settings.current.cache_clear()
    monkeypatch.setenv("TELEGRAM_SECRET", "s3cret")
    monkeypatch.setattr(registry, "_registered", dict(registry.handlers()))
    handlers, application = re.findall(r"^```python\n(# myapp/.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    exec(handlers, {"__name__": "myapp.handlers"})
    names: dict[str, Any] = {"__name__": "myapp.telegram"}
    exec(application, names)
    with engine().begin() as connection:
        connection.execute(text("CREATE TABLE note (text text)"))
    yield TestClient(names["app"], raise_server_exceptions=False)
    names["engine"].dispose()
    with engine().begin() as connection:
        connection.execute(text("DROP TABLE note"))


def test_repetitions_of_an_update_are_one_task_with_one_effect(telegram: TestClient) -> None:
    for _ in range(3):
        assert telegram.post("/telegram", json=UPDATE, headers={SECRET: "s3cret"}).status_code == 200
    assert rows("type, idempotency_key, payload->'message'->>'text'") == [
        ("telegram.update", "telegram:17", "Buy milk")
    ]
    ((id_,),) = rows("id")
    for _ in range(2):
        deliver(engine(), [id_])
    with engine().connect() as connection:
        assert connection.execute(text("SELECT text FROM note")).scalars().all() == ["Buy milk"]


def test_a_caller_without_the_secret_submits_nothing_and_its_body_is_not_read(telegram: TestClient) -> None:
    for headers in ({}, {SECRET: ""}, {SECRET: "wrong"}):
        assert telegram.post("/telegram", content=b"not JSON", headers=headers).status_code == 403
    assert rows() == []
