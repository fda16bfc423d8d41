"""Every error is answered in one shape, with the right status and without secrets."""

from __future__ import annotations

import logging

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import text
from sqlalchemy.exc import TimeoutError as PoolIsEmpty

import settings
from api import tasks as task_routes
from api.app import app
from api.tokens import Scope
from models.database_errors import translate
from models.engine import engine, make_engine
from models.errors import LedgerBusy
from tests.api.callers import Callers, expect_error
from tests.servers import ServersOfTests

SECRET = "hunter2"


def test_an_unreachable_ledger_is_503_without_its_address(
    callers: Callers, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = callers()
    monkeypatch.setenv("DATABASE_URL", f"postgresql://me:{SECRET}@127.0.0.1:1/x")
    settings.current.cache_clear()
    for answer in (caller.submit(key="k"), caller.get("/api/tasks/1"), caller.get("/nothing")):
        assert "The ledger is unreachable" in expect_error(answer, 503, "unreachable")
        assert "127.0.0.1" not in answer.text
        assert answer.headers["retry-after"] == "1"
    assert "127.0.0.1:1 is unreachable" in caplog.text
    assert SECRET not in caplog.text


def test_an_api_without_a_configured_ledger_is_503(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    home = tmp_path_factory.mktemp("nothing")
    monkeypatch.setenv("CELERIAC_HOME", str(home))
    settings.current.cache_clear()
    answer = client.get("/api/tasks/1", headers={"Authorization": "Bearer celeriac_" + "A" * 43})
    expect_error(answer, 503, "not_configured")
    assert str(home) not in answer.text


def test_a_ledger_without_a_schema_is_503(client: TestClient, stack: ServersOfTests, empty_database: str) -> None:
    stack.home.write_stack({**stack.addresses, "DATABASE_URL": empty_database})
    answer = client.get("/api/tasks/1", headers={"Authorization": "Bearer celeriac_" + "A" * 43})
    assert "manage.py migrate" in expect_error(answer, 503, "schema_mismatch")


def test_a_connection_that_breaks_in_the_middle_of_a_request_is_503(
    callers: Callers, stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = callers()

    def cut(_given: str) -> None:
        """Terminate the connection after the token was checked, inside the route's transaction."""
        with engine().connect() as ours, stack.cluster.superuser.connect() as superuser:
            pid = ours.execute(text("SELECT pg_backend_pid()")).scalar()
            superuser.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
            ours.execute(text("SELECT 1"))

    monkeypatch.setattr(task_routes, "parse_task_id", cut)
    expect_error(caller.get("/api/tasks/1"), 503, "unreachable")


def test_a_read_only_ledger_is_503(callers: Callers, stack: ServersOfTests) -> None:
    caller = callers()
    assert caller.get("/api/tasks/1").status_code == 404  # records the use of the token, which would be a write
    read_only = engine().url.update_query_dict({"options": "-c default_transaction_read_only=on"})
    address = read_only.render_as_string(hide_password=False)
    stack.home.write_stack({**stack.addresses, "DATABASE_URL": address.replace("+psycopg2", "")})
    settings.current.cache_clear()
    expect_error(caller.submit(), 503, "unreachable")


def test_an_unexpected_error_is_logged_with_its_traceback_and_hidden_from_the_client(
    callers: Callers, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_given: str) -> None:
        raise ZeroDivisionError(SECRET)

    monkeypatch.setattr(task_routes, "parse_task_id", broken)
    answer = callers().get("/api/tasks/1")
    expect_error(answer, 500, "internal")
    assert SECRET not in answer.text
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert SECRET in str(record.exc_info)


def test_a_bad_setting_is_500_and_not_blamed_on_the_client(
    callers: Callers, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGEST_HANDLERS", "nowhere.handlers")
    settings.current.cache_clear()
    answer = callers().submit()
    expect_error(answer, 500, "internal")
    assert "nowhere" not in answer.text
    assert "nowhere.handlers" in caplog.text


@pytest.mark.parametrize("state", ["40001", "40P01", "55P03", "57014"])
def test_a_lock_conflict_is_ledger_busy(database: str, state: str) -> None:
    raises = text(f"DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{state}'; END $$")
    with make_engine(database).connect() as connection:
        with pytest.raises(Exception, match="no") as caught:
            connection.execute(raises)
        connection.rollback()
        with pytest.raises(Exception, match="division") as ours:
            connection.execute(text("SELECT 1 / 0"))
    assert isinstance(translate(caught.value), LedgerBusy)
    assert translate(ours.value) is None
    connection.engine.dispose()


def test_an_exhausted_connection_pool_is_ledger_busy() -> None:
    assert isinstance(translate(PoolIsEmpty("QueuePool limit")), LedgerBusy)
    assert translate(ValueError()) is None


def test_a_wrong_method_is_405_and_lists_the_right_ones(callers: Callers) -> None:
    answer = callers().request("DELETE", "/api/tasks")
    expect_error(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == "POST"


def test_a_bad_parameter_is_named_and_its_value_is_not_repeated(callers: Callers) -> None:
    caller = callers(Scope.DOCUMENTS_READ)
    for query, name in (("", "q"), ("q=", "q"), ("q=x&limit=101", "limit"), (f"q=x&limit={SECRET}", "limit")):
        message = expect_error(caller.get(f"/api/knowledge/search?{query}"), 400, "misuse")
        assert message.startswith(f"`{name}`")
        assert SECRET not in message


def test_no_generated_api_pages_are_served() -> None:
    assert (app.docs_url, app.redoc_url, app.openapi_url) == (None, None, None)
