"""API clients for tests, each with a token of its own."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from fastapi.testclient import TestClient

from api import tokens
from api.tokens import Scope
from models.engine import engine

FLAKY = "demo.flaky"
_numbers = itertools.count(1)


def make_token(name: str, *scopes: str, types: Collection[str] = (), expires_in: timedelta | None = None) -> str:
    with engine().begin() as connection:
        return tokens.create(connection, name, scopes=scopes or tuple(Scope), types=types, expires_in=expires_in)[0]


@dataclass
class Caller:
    client: TestClient
    name: str
    token: str

    def get(self, path: str, **options: Any) -> Any:
        return self.request("GET", path, **options)

    def post(self, path: str, **options: Any) -> Any:
        return self.request("POST", path, **options)

    def delete(self, path: str, **options: Any) -> Any:
        return self.request("DELETE", path, **options)

    def request(self, method: str, path: str, *, key: str | None = None, **options: Any) -> Any:
        headers = {"Authorization": f"Bearer {self.token}", **options.pop("headers", {})}
        if key is not None:
            headers["Idempotency-Key"] = key
        return self.client.request(method, path, headers=headers, **options)

    def submit(self, payload: Any = None, *, key: str | None = None, **fields: Any) -> Any:
        return self.post("/api/tasks", json={"type": FLAKY, "payload": payload, **fields}, key=key)


@dataclass
class Callers:
    client: TestClient

    def __call__(self, *scopes: str, name: str | None = None, **options: Any) -> Caller:
        """Return a client with these scopes; without any, with all."""
        name = name or f"caller-{next(_numbers)}"
        return Caller(self.client, name, make_token(name, *scopes, **options))


def expect_error(answer: Any, status: int, code: str) -> str:
    """Check that the answer is an error with this status and code, and return its message."""
    assert (answer.status_code, list(answer.json())) == (status, ["error"]), answer.text
    error = answer.json()["error"]
    assert error["code"] == code, error
    message: str = error["message"]
    assert message.endswith("."), message
    assert "Traceback" not in answer.text
    return message
