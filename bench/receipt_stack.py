"""The system that `bench receipts` measures: servers, one API process, a worker that saves, and what makes them slow.

The worker is a real Celery worker on the queue `receipts`. Instead of beat and a worker for ticks, a thread sends the
messages that start savers and deliverers, as often as beat would. No worker runs the tasks that are saved, so that
saving alone is measured.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final

import redis
from celery import Celery
from sqlalchemy import make_url

from api import tokens
from bench.busy_postgres import busy_postgres
from bench.peers.programs import MeasurementFailed
from bench.scratch import scratch_servers
from child_process import ChildProcess, await_ready, end_all
from embedded.home import Home
from embedded.postgres import Postgres
from embedded.temporary_servers import environment
from models.engine import make_engine
from receipts.kinds import stream_keys
from settings import ROOT, Settings
from tasks.core.tick_intervals import CONSUME_SECONDS

VARIABLES: Final = {
    "RECEIPT_TWO_PHASE_ENABLED": "true",
    "INGEST_HANDLERS": "bench.peers.our_handlers",
    "REMAP_SIGTERM": "SIGQUIT",  # workers stop at once
}
START_SECONDS: Final = 60.0
IDLE_SECONDS: Final = 180.0  # until everything that was accepted is saved
_direct: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy cannot reach loopback


class Stack:
    """Running servers, and programs that use them."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self.folder = folder
        self.home = Home(settings.celeriac_home)
        self.engine = make_engine(settings.database_url)
        self.log: Any = redis.Redis.from_url(settings.redis_url, decode_responses=True)
        self.running: list[ChildProcess] = []
        self.port = 0

    @property
    def postgres(self) -> Postgres:
        return Postgres(self.home, make_url(self.settings.database_url).port or 0)

    def close(self) -> None:
        self.engine.dispose()
        self.log.close()

    def create_token(self, name: str, scope: tokens.Scope) -> str:
        with self.engine.begin() as connection:
            return tokens.create(connection, name, scopes=[scope])[0]

    @contextmanager
    def programs(self, variables: Mapping[str, str] | None = None) -> Iterator[None]:
        """Run the API and the worker until the end of the block."""
        self.port = self.home.ports({"api": 0}, wished={})["api"]
        try:
            self._start("api", _api_command(self.port), variables, is_ready=self._answers)
            self._start("receipts", _worker_command(self.settings), variables)
            await_ready(self.running, START_SECONDS)
            with _starting_consumers(self.settings):
                yield
        finally:
            end_all(self.running)
            self.running.clear()

    def await_saved(self) -> None:
        """Wait until everything that was accepted is saved."""
        give_up_at = time.monotonic() + IDLE_SECONDS
        while waiting := self.waiting():
            self.require_alive()
            if time.monotonic() > give_up_at:
                raise MeasurementFailed(f"{waiting:,} messages were not saved. {self.last_output()}")
            time.sleep(0.05)

    def waiting(self) -> int:
        """Return how many messages are accepted and not saved yet."""
        return sum(int(self.log.xlen(key)) for key in stream_keys())

    def require_alive(self) -> None:
        for program in self.running:
            if (code := program.exit_code()) is not None:
                raise MeasurementFailed(f"{program.name} ended with code {code}. {self.last_output()}")

    def last_output(self) -> str:
        return " ".join(path.read_text(errors="replace")[-1500:] for path in sorted(self.folder.glob("*.log")))

    @contextmanager
    def slow_commits(self, milliseconds: float) -> Iterator[dict[str, str]]:
        """Yield the variables with which a program's commits take so much longer."""
        command = [sys.executable, "-m", "chaos.slow_commits", str(milliseconds)]
        ready_file = self.folder / "slow-commits.ready"
        proxy = ChildProcess("slow-commits", command, log=self._log("slow-commits"), ready_file=ready_file, cwd=ROOT)
        try:
            proxy.await_ready()
            # With a parameter it is an address of the user: without one, it would be replaced by that of the stack.
            url = make_url(self.settings.database_url).set(
                port=int(ready_file.read_text()), query={"sslmode": "disable"}
            )
            yield {"DATABASE_URL": url.render_as_string(hide_password=False)}
        finally:
            proxy.end()

    def busy_postgres(self) -> AbstractContextManager[None]:
        """Keep PostgreSQL busy until the end of the block."""
        return busy_postgres(self.postgres, self.folder)

    def _start(self, name: str, command: list[str], variables: Mapping[str, str] | None, **options: Any) -> None:
        program = ChildProcess(
            name,
            command,
            log=self._log(name),
            ready_file=self.folder / f"{name}.ready",
            environment={**os.environ, **(variables or {})},
            cwd=ROOT,
            **options,
        )
        self.running.append(program)

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _answers(self) -> bool:
        try:
            with _direct.open(f"http://127.0.0.1:{self.port}/healthz", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@contextmanager
def running_servers() -> Iterator[Stack]:
    """Start servers without programs."""
    with (
        environment(VARIABLES),
        scratch_servers() as settings,
        tempfile.TemporaryDirectory(prefix="celeriac-bench-") as folder,
    ):
        stack = Stack(settings, Path(folder))
        try:
            yield stack
        finally:
            stack.close()


def _api_command(port: int) -> list[str]:
    guarded = ["--http=api.http_protocol:GuardedProtocol", "--ws=api.websocket_protocol:GuardedWebSocket"]
    guarded += ["--ws-max-size=1048576", "--ws-per-message-deflate=false"]
    place = ["--host=127.0.0.1", f"--port={port}", "--log-level=warning"]
    return [sys.executable, "-m", "uvicorn", "api.app:app", *guarded, *place]


def _worker_command(settings: Settings) -> list[str]:
    celery = [sys.executable, "-m", "celery", "-q", "-A", "tasks", "worker", "-n", "receipts@%h", "-l", "WARNING"]
    processes = str(2 * settings.receipt_shards)  # savers and deliverers
    queue = settings.broker_queue("receipts")
    return [*celery, "-Q", queue, "-c", processes, "--without-gossip", "--without-mingle"]


@contextmanager
def _starting_consumers(settings: Settings) -> Iterator[None]:
    """Send the messages that start savers and deliverers, as `receipts.tick` does."""
    app = Celery("celeriac-bench", broker=settings.broker_url, set_as_current=False)
    app.config_from_object("celeryconfig")
    queue, is_over = settings.broker_queue("receipts"), threading.Event()

    def send() -> None:
        while True:
            for name in ("receipts.save", "receipts.deliver"):
                app.send_task(name, queue=queue, expires=CONSUME_SECONDS, ignore_result=True)
            if is_over.wait(CONSUME_SECONDS):
                return

    thread = threading.Thread(target=send, name="receipts-tick", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        app.close()
