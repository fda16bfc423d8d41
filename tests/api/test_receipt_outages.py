"""Receipts over HTTP while PostgreSQL, Redis or both are down: accepting goes on, and no accepted id is unknown."""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi.testclient import TestClient
from sqlalchemy import make_url

import settings
from api import receiving, token_cache
from api.app import app
from bench.scratch import postgres_stopped, scratch_servers
from child_process import ChildProcess, OwnProcess, await_ready
from embedded.home import Home
from embedded.roles import PORTS
from embedded.stack import embedded_servers
from embedded.temporary_servers import environment
from models import engine as engine_module
from models.engine import engine
from models.receipts import Switch
from models.sql import sql
from receipts import kinds, switches
from tests.api.callers import FLAKY, Caller, Callers, expect_error
from tests.app import point_app_at
from tests.outbox.publishers.case import stopped
from tests.receipts.accepting import turn
from tests.receipts.saving import begin, ledger_ids, save_all
from tests.servers import wait_until
from tests.workflows.flows import STORE, flow

ROLE = "redis-receipts"
BROKER_ROLE = "redis-broker"
LIMIT_SECONDS = 5.0
ANSWERS = {  # what is down → the answers to an id that was accepted, one that was saved, one that no one knows
    "nothing": ((200, "accepted"), (200, "saved"), (404, "unknown_receipt")),
    "PostgreSQL": ((200, "accepted"), (200, "saved"), (503, "unreachable")),
    "Redis": ((503, "receipt_log_unreachable"), (200, "saved"), (503, "receipt_log_unreachable")),
    "both": ((503, "unreachable"), (503, "unreachable"), (503, "unreachable")),
    "the broker": ((200, "accepted"), (200, "saved"), (404, "unknown_receipt")),
}
TASK_ANSWERS = {
    "nothing": ((200, "accepted"), (200, None), (404, "unknown_task")),
    "PostgreSQL": ((200, "accepted"), (503, "unreachable"), (503, "unreachable")),
    "Redis": ((503, "receipt_log_unreachable"), (200, None), (503, "receipt_log_unreachable")),
    "both": ((503, "unreachable"), (503, "unreachable"), (503, "unreachable")),
    "the broker": ((200, "accepted"), (200, None), (404, "unknown_task")),
}
pytestmark = pytest.mark.guarantee


@dataclass
class Site:
    """Servers of their own, and the API in this process."""

    settings: settings.Settings
    callers: Callers
    restarted: list[ChildProcess]

    @contextmanager
    def redis_killed(self, role: str = ROLE) -> Iterator[None]:
        """End the receipt log, or the broker, with SIGKILL, and start it again at the end of the block."""
        home = Home(self.settings.celeriac_home)
        address = self.settings.redis_url if role == ROLE else self.settings.broker_url
        process = OwnProcess.read(home.pid_file(role))
        assert process is not None
        process.send_signal(signal.SIGKILL)
        assert process.wait(10)
        try:
            yield
        finally:
            ports = dict.fromkeys(PORTS, 0) | {role: make_url(address).port or 0}
            (program,) = (each for each in embedded_servers(home, ports)[0] if each.role == role)
            self.restarted.append(program.start(home))
            await_ready(self.restarted[-1:], 20)

    @contextmanager
    def silent(self, role: str) -> Iterator[None]:
        """Suspend a server: it accepts connections and does not answer. Open connections to PostgreSQL still work."""
        process = OwnProcess.read(Home(self.settings.celeriac_home).pid_file(role))
        assert process is not None
        with stopped(process):
            yield

    @contextmanager
    def down(self, what: str) -> Iterator[None]:
        with ExitStack() as stack:
            if what in ("PostgreSQL", "both"):
                stack.enter_context(postgres_stopped(self.settings))
            if what in ("Redis", "both"):
                stack.enter_context(self.redis_killed())
            if what == "the broker":
                stack.enter_context(self.redis_killed(BROKER_ROLE))
            yield


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    restarted: list[ChildProcess] = []
    with scratch_servers() as current, environment({"RECEIPT_TWO_PHASE_ENABLED": "true"}):
        point_app_at(current.broker_url)
        with TestClient(app, raise_server_exceptions=False) as client:
            yield Site(settings.current(), Callers(client), restarted)
        while engine_module._engines:
            engine_module._engines.popitem()[1].dispose()
    for child in restarted:
        child.popen.wait(5)


def accept(caller: Caller, payload: Any = None, *, key: str | None = None) -> Any:
    return caller.post("/api/tasks?receipt=accepted", json={"type": FLAKY, "payload": payload}, key=key)


def upload(caller: Caller, content: bytes, *, key: str) -> Any:
    path = "/api/knowledge/documents/upload-async?receipt=accepted"
    return caller.post(path, files={"file": ("notes.txt", content, "text/plain")}, key=key)


def shown(answer: Any) -> tuple[int, str | None]:
    """Return the status, and the level or the code of the error."""
    content = answer.json()
    return answer.status_code, content["error"]["code"] if "error" in content else content.get("level")


@pytest.mark.parametrize("what", ANSWERS)
def test_an_accepted_id_is_never_called_unknown_whatever_is_down(site: Site, what: str) -> None:
    caller = site.callers()
    saved = accept(caller, "saved").json()
    document = upload(caller, b"saved", key="saved").json()
    save_all()
    accepted = accept(caller, "accepted").json()
    waiting = upload(caller, b"accepted", key="accepted").json()
    unknown = str(uuid.uuid4())
    with site.down(what):
        for receipts in ((accepted, saved), (waiting, document)):
            ids = [*(receipt["id"] for receipt in receipts), unknown]
            assert tuple(shown(caller.get(f"/api/receipts/{id_}")) for id_ in ids) == ANSWERS[what]
        tasks = [accepted["id"], saved["id"], unknown]
        assert tuple(shown(caller.get(f"/api/tasks/{id_}")) for id_ in tasks) == TASK_ANSWERS[what]
        uploads = [waiting["id"], document["id"], unknown]
        assert tuple(shown(caller.get(f"/api/knowledge/tasks/{id_}")) for id_ in uploads) == TASK_ANSWERS[what]
    save_all()
    assert caller.get(f"/api/tasks/{accepted['id']}").json()["taskId"] == accepted["id"]


def test_while_postgresql_is_down_accepted_goes_on_for_known_tokens_and_all_is_saved_afterwards(site: Site) -> None:
    caller, other = site.callers(), site.callers()
    before = set(ledger_ids())
    receipts = [accept(caller, 0, key="0").json()]
    with postgres_stopped(site.settings):
        receipts += [accept(caller, n, key=f"{n}").json() for n in range(1, 10)]
        receipts += [upload(caller, b"%d" % n, key=f"{n}").json() for n in range(3)]
        receipts.append(caller.post("/api/workflows/apply?receipt=accepted", json=flow(STORE)).json())
        again = accept(caller, 5, key="5")
        assert (again.status_code, again.json()["duplicate"]) == (200, True)
        assert accept(caller, "other", key="5").status_code == 409
        expect_error(accept(other, 1), 503, "unreachable")
        assert other.get(f"/api/receipts/{receipts[0]['id']}").status_code == 503, "only the ledger knows this token"
        late = caller.get(f"/api/receipts/{receipts[1]['id']}?level=saved", headers={"Prefer": "wait=0"})
        assert (late.status_code, late.json()["level"]) == (202, "accepted")
    assert {receipt["level"] for receipt in receipts} == {"accepted"}
    save_all()
    assert sorted(set(ledger_ids()) - before) == sorted(uuid.UUID(receipt["id"]) for receipt in receipts)
    for receipt in receipts:
        assert shown(caller.get(f"/api/receipts/{receipt['id']}?level=saved")) == (200, "saved")


def test_while_redis_is_down_messages_are_saved_at_once_without_order_or_refused(site: Site) -> None:
    caller = site.callers()
    first = accept(caller, 0, key="0").json()
    with site.redis_killed():
        answer = accept(caller, 0, key="0")
        assert (answer.status_code, answer.json()["id"]) == (202, first["id"])
        assert (answer.json()["level"], answer.json()["ordered"]) == ("saved", False)
        new = upload(caller, b"text", key="new").json()
        assert (new["level"], new["ordered"]) == ("saved", False)
    with site.redis_killed():
        turn_in_ledger(Switch.FAIL_OPEN, is_on=False)
        refused = accept(caller, 1, key="1")
        expect_error(refused, 503, "server_busy")
        assert refused.headers["Retry-After"] == "1"
    turn(Switch.FAIL_OPEN, None)
    forget_switches()
    save_all()
    found = ledger_ids()
    assert (found.count(uuid.UUID(first["id"])), found.count(uuid.UUID(new["id"]))) == (1, 1)


def turn_in_ledger(switch: Switch, *, is_on: bool) -> None:
    """Set a switch while Redis is down."""
    with engine().begin() as connection:
        switches.set_switch(connection, switch, is_on=is_on, actor="test")
    forget_switches()


def forget_switches() -> None:
    """Let the API read the switches from the ledger again, as it does after a second."""
    for each in receiving._by_loop.values():
        each._switches = None


def test_with_both_down_the_answer_is_503_and_nothing_is_written(site: Site) -> None:
    caller = site.callers()
    accept(caller, 0)
    save_all()
    before = ledger_ids()
    with site.down("both"):
        message = expect_error(accept(caller, 1), 503, "unreachable")
        assert message.startswith("The ledger is unreachable.")
    save_all()
    assert ledger_ids() == before


def test_too_much_that_waits_is_answered_429_with_retry_after(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECEIPT_STREAM_LIMIT", "2")
    settings.current.cache_clear()
    caller = site.callers()
    assert [accept(caller, n).status_code for n in range(2)] == [202, 202]
    refused = accept(caller, 2)
    expect_error(refused, 429, "receipts_full")
    assert int(refused.headers["Retry-After"]) >= 1
    save_all()
    assert accept(caller, 2).status_code == 202
    save_all()


@pytest.fixture(autouse=True)
def _settings_of_the_site(site: Site) -> Iterator[None]:
    settings.current.cache_clear()
    yield
    settings.current.cache_clear()


def test_with_both_silent_a_message_is_answered_503_in_time(site: Site) -> None:
    caller = site.callers()
    receipt = accept(caller, 0).json()
    engine().dispose()  # new connections get no answer
    with site.silent("postgres"), site.silent(ROLE):
        started_at = time.monotonic()
        expect_error(accept(caller, 1), 503, "unreachable")
        assert time.monotonic() - started_at < LIMIT_SECONDS
    wait_until(lambda: shown(caller.get(f"/api/receipts/{receipt['id']}")) == (200, "accepted"), "it is found again")
    save_all()


@pytest.mark.parametrize("resource", ["receipts", "tasks"])
def test_with_both_silent_the_status_of_a_message_is_answered_503_in_time(
    site: Site, monkeypatch: pytest.MonkeyPatch, resource: str
) -> None:
    caller = site.callers()
    receipt = accept(caller, 0).json()
    monkeypatch.setattr(token_cache, "FRESH_SECONDS", 0.0)  # the ledger is asked about the token, too
    engine().dispose()  # new connections get no answer
    with site.silent("postgres"), site.silent(ROLE):
        started_at = time.monotonic()
        expect_error(caller.get(f"/api/{resource}/{receipt['id']}"), 503, "unreachable")
        assert time.monotonic() - started_at < LIMIT_SECONDS
    wait_until(lambda: shown(caller.get(f"/api/{resource}/{receipt['id']}")) == (200, "accepted"), "it is found again")
    save_all()


def test_an_accepted_id_is_not_unknown_although_the_setting_was_switched_off_before_anything_was_saved(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger has no receipt and no switch. A saver has held the shard, and could not save."""
    caller = site.callers()
    receipt = accept(caller, 0).json()
    with engine().begin() as connection:
        for table in ("receipt", "receipt_switch", "shard_lease"):
            connection.execute(sql(f"DELETE FROM ledger.{table}"))
    begin(kind=kinds.TASKS).end()
    monkeypatch.setenv("RECEIPT_TWO_PHASE_ENABLED", "false")
    settings.current.cache_clear()
    with site.down("Redis"):
        for path in ("receipts", "tasks"):
            assert shown(caller.get(f"/api/{path}/{receipt['id']}")) == (503, "receipt_log_unreachable")
    assert shown(caller.get(f"/api/receipts/{receipt['id']}")) == (200, "accepted")
    save_all()
    assert shown(caller.get(f"/api/receipts/{receipt['id']}")) == (200, "saved")


def test_without_receipts_an_unknown_id_is_unknown_although_redis_is_down(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine().begin() as connection:
        for table in ("receipt", "receipt_switch", "shard_lease"):
            connection.execute(sql(f"DELETE FROM ledger.{table}"))
    monkeypatch.setenv("RECEIPT_TWO_PHASE_ENABLED", "false")
    settings.current.cache_clear()
    with site.down("Redis"):
        assert shown(site.callers().get(f"/api/tasks/{uuid.uuid4()}")) == (404, "unknown_task")


def test_a_client_whose_api_process_is_killed_before_it_answers_repeats_its_request_and_has_one_task(
    site: Site, tmp_path: Path
) -> None:
    caller = site.callers()
    ports = Home(site.settings.celeriac_home).ports({"killed-api": 0}, wished={})
    address = f"http://127.0.0.1:{ports['killed-api']}"
    command = [sys.executable, "-m", "uvicorn", "api.app:app", f"--port={ports['killed-api']}", "--log-level=warning"]
    child = ChildProcess(
        "api",
        command,
        log=tmp_path / "api.log",
        environment={**os.environ, "FAILPOINTS": "receipts.after_accept=kill"},
        is_ready=lambda: _answers(address),
    )
    child.await_ready(30)
    headers = {"Authorization": f"Bearer {caller.token}", "Idempotency-Key": "killed"}
    body = {"type": FLAKY, "payload": "killed"}
    with pytest.raises(httpx2.TransportError):
        httpx2.post(f"{address}/api/tasks?receipt=accepted", json=body, headers=headers, trust_env=False)
    assert child.popen.wait(10) == -signal.SIGKILL
    again = accept(caller, "killed", key="killed")
    assert (again.status_code, again.json()["level"], again.json()["duplicate"]) == (200, "accepted", True)
    save_all()
    assert ledger_ids().count(uuid.UUID(again.json()["id"])) == 1


def _answers(address: str) -> bool:
    try:
        return bool(httpx2.get(f"{address}/healthz", trust_env=False).status_code == 200)
    except httpx2.TransportError:
        return False
