"""While PostgreSQL is silent (stopped, but not ended), every request is answered 503 within five seconds."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx2
import psutil
import pytest
from starlette.datastructures import UploadFile

from api import documents as document_routes
from api import ledger_calls
from api import tasks as task_routes
from api.documents import UPLOAD
from api.tasks import parse_task_id
from models.engine import engine
from tests.api.callers import FLAKY, make_token
from tests.api.server import Server
from tests.servers import ServersOfTests, wait_until

LIMIT_SECONDS = 5.0
LARGE = 16 * 1024 * 1024  # bytes
FLOW = {"stages": [{"name": "a", "kind": "python", "function": "test.greet"}]}
REQUESTS: list[tuple[str, str, dict[str, Any]]] = [
    ("GET", "/readyz", {}),
    ("GET", "/api/tasks/1", {}),
    ("GET", "/api/tasks/1/transitions", {}),
    ("POST", "/api/tasks", {"json": {"type": FLAKY}}),
    ("POST", "/api/workflows/apply?wait=30", {"json": FLOW}),
    ("POST", UPLOAD, {"files": {"file": ("a.txt", b"text", "text/plain")}}),
    ("GET", "/api/knowledge/documents", {}),
    ("DELETE", "/api/knowledge/documents?name=a", {}),
    ("GET", "/api/knowledge/tasks/1", {}),
    ("GET", "/api/knowledge/search?q=a", {}),
    ("GET", "/nothing", {}),
]


class Silence:
    """Stops the PostgreSQL of the tests, process by process."""

    def __init__(self, stack: ServersOfTests) -> None:
        self.root = psutil.Process(stack.running["postgres"].popen.pid)
        self.stopped: list[psutil.Process] = []

    def begin(self) -> None:
        self._stop(self.root)  # the postmaster first, so that it starts no others
        for process in self.root.children(recursive=True):
            self._stop(process)

    def _stop(self, process: psutil.Process) -> None:
        self.stopped.append(process)
        process.send_signal(signal.SIGSTOP)
        over = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)  # one that has ended waits for the postmaster
        wait_until(lambda: process.status() in over, "the process is stopped")

    def end(self) -> None:
        for process in reversed(self.stopped):
            process.send_signal(signal.SIGCONT)
        self.stopped.clear()


@pytest.fixture
def silence(stack: ServersOfTests) -> Iterator[Silence]:
    silence = Silence(stack)
    yield silence
    silence.end()


@contextmanager
def silent(silence: Silence) -> Iterator[None]:
    silence.begin()
    try:
        yield
    finally:
        silence.end()


@pytest.fixture
def client(server: Server) -> Iterator[httpx2.Client]:
    headers = {"Authorization": f"Bearer {make_token('ci')}"}
    address, limits = f"http://127.0.0.1:{server.port}", httpx2.Limits(max_connections=200)
    with httpx2.Client(base_url=address, headers=headers, timeout=60, limits=limits, trust_env=False) as client:
        yield client


def timed(client: httpx2.Client, request: tuple[str, str, dict[str, Any]]) -> tuple[int, str, float]:
    method, path, options = request
    started_at = time.monotonic()
    answer = client.request(method, path, **options)
    code = answer.json()["error"]["code"] if answer.status_code >= 400 else ""
    return answer.status_code, code, time.monotonic() - started_at


@pytest.mark.guarantee
@pytest.mark.parametrize("is_warm", [True, False], ids=["open connections", "new connections"])
def test_every_request_is_answered_503_in_time_while_postgresql_is_silent(
    client: httpx2.Client, silence: Silence, is_warm: bool
) -> None:
    assert client.get("/readyz").status_code == 200
    if not is_warm:
        engine().dispose()
    requests = REQUESTS * 5  # more than there are threads
    with silent(silence), ThreadPoolExecutor(len(requests)) as pool:
        answers = list(pool.map(lambda each: timed(client, each), requests))
        assert client.get("/healthz").status_code == 200
    assert {(status, code) for status, code, _ in answers} == {(503, "unreachable")}
    assert max(seconds for _, _, seconds in answers) < LIMIT_SECONDS
    wait_until(lambda: client.get("/readyz").status_code == 200, "the API is ready again")
    assert timed(client, REQUESTS[3])[0] == 202


@pytest.mark.parametrize("place", [task_routes, document_routes], ids=lambda place: place.__name__)
def test_a_silence_that_begins_in_the_middle_of_a_request_is_answered_503_in_time(
    client: httpx2.Client, silence: Silence, monkeypatch: pytest.MonkeyPatch, place: Any
) -> None:
    def stop_and_parse(given: str) -> Any:
        silence.begin()
        return parse_task_id(given)

    monkeypatch.setattr(place, "parse_task_id", stop_and_parse)
    path = "/api/tasks/" if place is task_routes else "/api/knowledge/tasks/"
    status, code, seconds = timed(client, ("GET", f"{path}00000000-0000-0000-0000-000000000000", {}))
    assert (status, code) == (503, "unreachable")
    assert seconds < LIMIT_SECONDS


@pytest.mark.guarantee
def test_a_large_upload_is_answered_503_in_time_if_the_silence_begins_after_the_token_was_checked(
    client: httpx2.Client, silence: Silence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has more time than other requests to be stored, which must not delay the answer."""
    read = UploadFile.read

    async def stop_and_read(file: UploadFile, size: int = -1) -> bytes:
        silence.begin()
        return await read(file, size)

    monkeypatch.setattr(UploadFile, "read", stop_and_read)
    assert ledger_calls.SECONDS + LARGE / document_routes.STORED_BYTES_PER_SECOND > LIMIT_SECONDS
    upload = {"files": {"file": ("a.txt", b"x" * LARGE, "text/plain")}}
    status, code, seconds = timed(client, ("POST", UPLOAD, upload))
    assert (status, code) == (503, "unreachable")
    assert seconds < LIMIT_SECONDS


def test_calls_that_were_given_up_before_they_began_are_never_made() -> None:
    """Otherwise a long silence would end with a flood of submits whose clients were told that they failed."""
    threads, is_over, made = ledger_calls._Threads(1), threading.Event(), []
    first = threads.submit(is_over.wait)
    given_up = threads.submit(lambda: made.append("given up"))
    assert given_up.cancel()
    last = threads.submit(lambda: made.append("last"))
    is_over.set()
    last.result(10)
    assert (first.result(10), made) == (True, ["last"])
