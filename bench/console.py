"""Measure how long each page of the console takes in a ledger with many tasks.

A real API process renders the pages. The time is from the request to the end of the answer, over loopback; so it
contains the time of PostgreSQL, the template and HTTP. All pages are loaded in turn, so that none gets the figures of
the ledger that were read for it the time before.
"""

from __future__ import annotations

import http.client
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from api import tokens
from api.tokens import Scope
from bench.large_ledger import fill
from bench.peers.programs import MeasurementFailed
from bench.scratch import scratch_servers
from child_process import ChildProcess, await_ready, end_all
from console import sessions
from console.door import PREFIX
from console.overview_feed import READ_SECONDS
from console.pages import NAVIGATION
from console.slow_answers import KEPT_SECONDS
from console.visitors import SESSION
from embedded.home import Home
from models.engine import engine
from models.sql import sql
from settings import ROOT

CALLS: Final = 5
TURN_SECONDS: Final = 1.5 * max(READ_SECONDS, KEPT_SECONDS)
START_SECONDS: Final = 60.0
GOAL_MS: Final = 150.0
SOME_TASK: Final = sql("SELECT id FROM ledger.ingest_task WHERE status = 'DEAD' ORDER BY finished_at DESC LIMIT 1")
# Lists that read different indexes, and a page that is far from the first.
LISTS: Final = (
    "status:dead",
    "status:succeeded",
    "status:queued type:type.3",
    "type:type.3 queue:queue-1",
    "text:failed since:30d",
)


@dataclass(frozen=True, slots=True)
class Answer:
    """The time of one request in seconds, and the size of its answer in bytes."""

    seconds: float
    size: int


@dataclass(frozen=True, slots=True)
class Page:
    """The median and the longest time of one page in seconds, and its size in bytes."""

    path: str
    seconds: float
    longest: float
    size: int


def measure(*, tasks: int, events: int, tally: int, say: Callable[[str], None]) -> list[Page]:
    """Fill a temporary ledger and load each page several times."""
    with scratch_servers() as settings, tempfile.TemporaryDirectory(prefix="celeriac-bench-") as folder:
        try:
            fill(tasks=tasks, events=events, tally=tally, say=say)
            with engine().begin() as connection:
                secret, _ = tokens.create(connection, "bench", scopes=list(Scope))
                task_id = connection.execute(SOME_TASK).scalar_one()
            session = sessions.log_in(engine(), secret)
            port = Home(settings.celeriac_home).ports({"api": 0}, wished={})["api"]
            with _api(port, Path(folder)):
                return _load_all(port, session, _paths(str(task_id)), say)
        finally:
            engine().dispose()


def _paths(task_id: str) -> list[str]:
    lists = [f"{PREFIX}/tasks?q={query.replace(' ', '+')}" for query in LISTS]
    return [*(entry.path for entry in NAVIGATION), *lists, f"{PREFIX}/tasks/{task_id}"]


def _load_all(port: int, session: str, paths: Sequence[str], say: Callable[[str], None]) -> list[Page]:
    found: dict[str, list[Answer]] = {path: [] for path in paths}
    for turn in range(CALLS + 1):
        say(f"loading {len(paths)} pages, {turn + 1} of {CALLS + 1} …")
        began_at = time.monotonic()
        for path in paths:
            found[path].append(_load(port, session, path))
        time.sleep(max(0.0, began_at + TURN_SECONDS - time.monotonic()))
    return [_page(path, answers[1:]) for path, answers in found.items()]  # the first one connects and prepares


def _load(port: int, session: str, path: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        began_at = time.perf_counter()
        connection.request("GET", path, headers={"Cookie": f"{SESSION}_{port}={session}"})
        answer = connection.getresponse()
        size = len(answer.read())
        seconds = time.perf_counter() - began_at
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise MeasurementFailed(f"{path} was answered {answer.status}.")
    return Answer(seconds, size)


def _page(path: str, answers: Sequence[Answer]) -> Page:
    seconds = [each.seconds for each in answers]
    return Page(path, statistics.median(seconds), max(seconds), answers[-1].size)


@contextmanager
def _api(port: int, folder: Path) -> Iterator[None]:
    command = [sys.executable, "-m", "uvicorn", "api.app:app", "--http=api.http_protocol:GuardedProtocol"]
    command += ["--host=127.0.0.1", f"--port={port}", "--log-level=warning"]
    api = ChildProcess(
        "api",
        command,
        log=folder / "api.log",
        ready_file=folder / "api.ready",
        cwd=ROOT,
        is_ready=lambda: _answers(port),
    )
    try:
        await_ready([api], START_SECONDS)
        yield
    finally:
        end_all([api])


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == http.client.OK
    except OSError:
        return False
    finally:
        connection.close()
