"""Times are printed and read in UTC, and impossible times are rejected."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from models.engine import engine
from models.sql import sql
from tasks.execution.deliver import deliver
from tests.outbox.ledger import insert
from tests.servers import ServersOfTests
from tests.tasks import work
from tests.tasks.command_line import FLAKY, dead, manage, statuses, submitted

UNKNOWN = uuid.UUID(int=1)
PRINTED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")
IN_JSON = re.compile(r'"(\d{4}-\d\d-\d\dT[^"_]*)"')


@pytest.fixture
def in_shanghai(stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Connect with a session time zone other than UTC."""
    monkeypatch.setenv("PGTZ", "Asia/Shanghai")
    engine().dispose()  # connections of the test before
    with engine().connect() as connection:
        assert connection.execute(sql("SHOW timezone")).scalar() == "Asia/Shanghai"
    yield
    engine().dispose()


def is_now(at: datetime) -> bool:
    return abs(datetime.now(UTC) - at) < timedelta(minutes=10)


def commands_that_print_times() -> list[list[object]]:
    """Return the commands, after creating something for each of them to print."""
    (died,) = dead()
    (retrying,) = submitted({"fail": 1})
    deliver(engine(), [retrying])
    assert manage("retry-now", retrying).code == 0
    insert("hook", status="DEAD", last_error="no")
    assert manage("token", "create", "ci", "--scope", "tasks:read", "--expires-in", "1s").code == 0
    return [["tasks"], ["show", died], ["show", retrying], ["stats"], ["outbox", "--status", "DEAD"], ["token", "list"]]


@pytest.mark.usefixtures("in_shanghai")
def test_times_are_printed_in_utc_whatever_the_time_zone_of_the_session() -> None:
    for command in commands_that_print_times():
        said = manage(*command).out
        printed = PRINTED.findall(said)
        assert printed, command
        assert all(is_now(datetime.fromisoformat(at).replace(tzinfo=UTC)) for at in printed), said
        assert "UTC" in said, command
        in_json = IN_JSON.findall(manage(*command, "--json").out)
        assert in_json, command
        assert {datetime.fromisoformat(at).utcoffset() for at in in_json} == {timedelta()}, command


@pytest.mark.usefixtures("in_shanghai")
def test_a_printed_time_can_be_pasted_into_an_option() -> None:
    (task,) = dead()
    with engine().begin() as connection:
        connection.execute(sql("UPDATE ledger.ingest_task SET finished_at = date_trunc('second', finished_at)"))
    (at,) = re.findall(r"finished +(.+ UTC)", manage("show", task).out)
    assert at in manage("show", task).out.partition("why it is not running")[2]  # the reason names the same time
    for copied in (at, at.removesuffix(" UTC")):
        assert manage("discard-dead", "--until", copied, "--json").json["done"] == 0
        assert manage("requeue-dead", "--since", copied, "--dry-run", "--json").json["total"] == 1
    assert statuses([task]) == ["DEAD"]
    assert work.task(task)["finished_at"] == datetime.fromisoformat(at.replace(" UTC", "+00:00"))


IMPOSSIBLE = [
    "999999d",
    "-5d",
    "9999999d",
    "99999-01-01",
    "0000-01-01",
    "-2026-01-01",
    "2026-13-01",
    "1e9s",
    "",
    " UTC",
]


@pytest.mark.parametrize("given", IMPOSSIBLE)
def test_an_impossible_time_is_refused(stack: ServersOfTests, given: str) -> None:
    commands = (["tasks"], ["requeue-dead", "--dry-run"], ["discard-dead"], ["outbox", "requeue-dead", "--dry-run"])
    for command in commands:
        for option in ("--since", "--until"):
            refused = manage(*command, option, given)
            assert refused.code == 2, (command, option)
            assert refused.out == ""
            assert re.search(" is (not|before) ", " ".join(refused.err.split()))


@pytest.mark.parametrize("given", ["700000d", "999999s", "0001-01-01T00:00+14:00", "9999-12-31T23:59-12:00"])
def test_a_time_at_the_edge_of_the_calendar_is_accepted(stack: ServersOfTests, given: str) -> None:
    for command in (["tasks"], ["requeue-dead", "--dry-run"], ["outbox", "requeue-dead", "--dry-run"]):
        for option in ("--since", "--until"):
            assert manage(*command, option, given, "--json").code == 0


def test_a_cursor_before_the_year_1_is_refused(stack: ServersOfTests) -> None:
    refused = manage("tasks", "--before", f"0001-01-01T00:00+14:00_{UNKNOWN}")
    assert (refused.code, "is not a cursor" in refused.err) == (2, True)


@pytest.mark.parametrize("given", ["999999d", "99999-01-01", "-5d"])
def test_a_task_for_an_impossible_time_is_refused(stack: ServersOfTests, given: str) -> None:
    refused = manage("submit", FLAKY, "1", "--run-at", given)
    assert (refused.code, "Traceback" in refused.err, work.rows()) == (2, False, [])
