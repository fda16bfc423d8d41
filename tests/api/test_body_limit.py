"""A body that is too large is rejected before it is kept, whatever length the client declares."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastapi import FastAPI, Request, UploadFile
from fastapi.testclient import TestClient

import settings
from api.body_limit import BodyLimit
from api.documents import MULTIPART_BYTES, UPLOAD
from api.error_middleware import ErrorMiddleware
from tasks.submission.json_lines import LINE_LIMIT
from tests.api.callers import Callers, expect_error
from tests.tasks import work

PIECE = b" " * 65_536


class Stream:
    """A body without a declared length that counts how much of it was sent."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.sent = 0

    def __iter__(self) -> Iterator[bytes]:
        while self.sent < self.size:
            piece = PIECE[: self.size - self.sent]
            self.sent += len(piece)
            yield piece


def test_a_declared_length_that_is_too_large_is_rejected(callers: Callers) -> None:
    stream = Stream(LINE_LIMIT + 1)
    headers = {"Content-Length": str(stream.size)}
    answer = callers().post("/api/tasks", content=stream, headers=headers)
    assert f"{LINE_LIMIT:,} bytes" in expect_error(answer, 413, "body_too_large")


@pytest.mark.parametrize("declared", [None, "10"])
def test_a_missing_or_false_declared_length_does_not_evade_the_limit(callers: Callers, declared: str | None) -> None:
    headers = {"Content-Length": declared} if declared else {}
    answer = callers().post("/api/tasks", content=Stream(LINE_LIMIT + 1), headers=headers)
    expect_error(answer, 413, "body_too_large")
    assert work.rows() == []


def test_a_body_of_exactly_the_limit_is_accepted(callers: Callers) -> None:
    body = b'{"type": "demo.flaky"}'
    answer = callers().post("/api/tasks", content=body + b" " * (LINE_LIMIT - len(body)))
    assert answer.status_code == 202


@pytest.mark.parametrize("is_declared", [True, False])
def test_an_upload_may_be_as_large_as_a_document(
    callers: Callers, monkeypatch: pytest.MonkeyPatch, is_declared: bool
) -> None:
    monkeypatch.setenv("DOCUMENT_MAX_BYTES", "100000")
    settings.current.cache_clear()
    limit = 100_000 + MULTIPART_BYTES
    head = b'--x\r\nContent-Disposition: form-data; name="another"; filename="a.txt"\r\n\r\n'
    tail = b"\r\n--x--\r\n"

    def body(size: int) -> Iterator[bytes]:
        yield head + b"a" * (size - len(head) - len(tail)) + tail

    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    if is_declared:
        headers["Content-Length"] = str(limit + 1)
    expect_error(callers().post(UPLOAD, content=body(limit + 1), headers=headers), 413, "body_too_large")
    headers["Content-Length"] = str(limit)
    assert "field `file`" in expect_error(callers().post(UPLOAD, content=body(limit), headers=headers), 400, "misuse")


def test_a_parser_that_catches_the_error_cannot_hide_it() -> None:
    """FastAPI's own parsers would answer 400 instead of 413."""
    app = FastAPI()
    app.add_middleware(BodyLimit, limit=1000, limits={})
    app.add_middleware(ErrorMiddleware)
    started = []

    @app.post("/form")
    async def form(file: UploadFile) -> None:
        started.append("form")

    @app.post("/json")
    async def json(body: dict[str, str]) -> None:
        started.append("json")

    @app.post("/careless")
    async def careless(request: Request) -> str:
        try:
            await request.body()
        except Exception:
            return "never mind"
        return "read"

    client = TestClient(app, raise_server_exceptions=False)
    json_type, form_type = "application/json", "multipart/form-data; boundary=x"
    for path, kind in (("/form", form_type), ("/json", json_type), ("/careless", json_type)):
        expect_error(client.post(path, content=Stream(1001), headers={"Content-Type": kind}), 413, "body_too_large")
    assert started == []
    assert client.post("/careless", content=Stream(1000)).json() == "read"
