"""A client cannot make the API keep more than it takes, whatever it declares."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastapi import FastAPI, Request, UploadFile
from fastapi.testclient import TestClient

import settings
from api.body_limit import BodyLimit
from api.documents import AROUND_A_FILE, UPLOAD
from api.error_middleware import Answering
from tasks.submission.json_lines import LINE_LIMIT
from tests.api.callers import Callers, refused
from tests.tasks import work

PIECE = b" " * 65_536


class Stream:
    """A body without a declared length, which knows how much of it was taken."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken = 0

    def __iter__(self) -> Iterator[bytes]:
        while self.taken < self.size:
            piece = PIECE[: self.size - self.taken]
            self.taken += len(piece)
            yield piece


def test_a_declared_length_that_is_too_large_is_refused_before_a_byte_is_read(callers: Callers) -> None:
    stream = Stream(LINE_LIMIT + 1)
    headers = {"Content-Length": str(stream.size)}
    answer = callers().post("/api/tasks", content=stream, headers=headers)
    assert f"{LINE_LIMIT:,} bytes" in refused(answer, 413, "body_too_large")


@pytest.mark.parametrize("declared", [None, "10"])
def test_bytes_are_counted_when_no_length_is_declared_or_a_lie(callers: Callers, declared: str | None) -> None:
    headers = {"Content-Length": declared} if declared else {}
    answer = callers().post("/api/tasks", content=Stream(LINE_LIMIT + 1), headers=headers)
    refused(answer, 413, "body_too_large")
    assert work.rows() == []


def test_a_body_of_just_the_limit_is_read(callers: Callers) -> None:
    body = b'{"type": "demo.flaky"}'
    answer = callers().post("/api/tasks", content=body + b" " * (LINE_LIMIT - len(body)))
    assert answer.status_code == 202


@pytest.mark.parametrize("is_declared", [True, False])
def test_an_upload_has_the_limit_of_documents(
    callers: Callers, monkeypatch: pytest.MonkeyPatch, is_declared: bool
) -> None:
    monkeypatch.setenv("DOCUMENT_MAX_BYTES", "100000")
    settings.current.cache_clear()
    limit = 100_000 + AROUND_A_FILE
    head = b'--x\r\nContent-Disposition: form-data; name="another"; filename="a.txt"\r\n\r\n'
    tail = b"\r\n--x--\r\n"

    def body(size: int) -> Iterator[bytes]:
        yield head + b"a" * (size - len(head) - len(tail)) + tail

    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    if is_declared:
        headers["Content-Length"] = str(limit + 1)
    refused(callers().post(UPLOAD, content=body(limit + 1), headers=headers), 413, "body_too_large")
    headers["Content-Length"] = str(limit)
    assert "field `file`" in refused(callers().post(UPLOAD, content=body(limit), headers=headers), 400, "misuse")


def test_whoever_reads_the_body_it_is_too_large() -> None:
    """FastAPI's own parsing would call it a bad request."""
    app = FastAPI()
    app.add_middleware(BodyLimit, limit=1000, limits={})
    app.add_middleware(Answering)
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
        refused(client.post(path, content=Stream(1001), headers={"Content-Type": kind}), 413, "body_too_large")
    assert started == []
    assert client.post("/careless", content=Stream(1000)).json() == "read"
