"""Times that an operator reads and types: one time zone in both directions, and nothing that the calendar lacks."""

from __future__ import annotations

import re
import uuid
from datetime import UTC, datetime, timedelta

import pytest

from models.engine import engine
from models.sql import sql
from tasks.execution.deliver import ingest
from tests.outbox.ledger import insert
from tests.servers import ServersOfTests
from tests.tasks import work
from tests.tasks.door import FLAKY, dead, manage, statuses, submitted

NOBODY = uuid.UUID(int=1)
PRINTED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")
IN_JSON = re.compile(r'"(\d{4}-\d\d-\d\dT[^"_]*)"')


@pytest.fixture
def in_shanghai(stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever connects from here has another time zone than UTC."""
    monkeypatch.setenv("PGTZ", "Asia/Shanghai")
    with engine().connect() as connection:
        assert connection.execute(sql("SHOW timezone")).scalar() == "Asia/Shanghai"


def is_now(at: datetime) -> bool:
    return abs(datetime.now(UTC) - at) < timedelta(minutes=10)


def everything_that_shows_times() -> list[list[object]]:
    """Commands, after something has happened that each of them has to tell of."""
    (died,) = dead()
    (retrying,) = submitted({"fail": 1})
    ingest(engine(), [retrying])
    assert manage("retry-now", retrying).code == 0
    insert("hook", status="DEAD", last_error="no")
    assert manage("token", "create", "ci", "--scope", "tasks:read", "--expires-in", "1s").code == 0
    return [["tasks"], ["show", died], ["show", retrying], ["stats"], ["outbox", "--status", "DEAD"], ["token", "list"]]


@pytest.mark.usefixtures("in_shanghai")
def test_every_time_is_printed_in_utc_and_says_so_whatever_the_time_zone_of_the_session() -> None:
    for command in everything_that_shows_times():
        said = manage(*command).out
        printed = PRINTED.findall(said)
        assert printed, command
        assert all(is_now(datetime.fromisoformat(at).replace(tzinfo=UTC)) for at in printed), said
        assert "UTC" in said, command
        in_json = IN_JSON.findall(manage(*command, "--json").out)
        assert in_json, command
        assert {datetime.fromisoformat(at).utcoffset() for at in in_json} == {timedelta()}, command


@pytest.mark.usefixtures("in_shanghai")
def test_a_time_that_is_copied_from_what_was_printed_is_the_same_time() -> None:
    (task,) = dead()
    with engine().begin() as connection:
        connection.execute(sql("UPDATE ledger.ingest_task SET finished_at = date_trunc('second', finished_at)"))
    (at,) = re.findall(r"finished +(.+ UTC)", manage("show", task).out)
    assert at in manage("show", task).out.partition("why it is not running")[2]  # the sentence says the same
    for copied in (at, at.removesuffix(" UTC")):
        assert manage("discard-dead", "--until", copied, "--json").json["done"] == 0
        assert manage("requeue-dead", "--since", copied, "--dry-run", "--json").json["total"] == 1
    assert statuses([task]) == ["DEAD"]
    assert work.task(task)["finished_at"] == datetime.fromisoformat(at.replace(" UTC", "+00:00"))


ABSURD = ["999999d", "-5d", "9999999d", "99999-01-01", "0000-01-01", "-2026-01-01", "2026-13-01", "1e9s", "", " UTC"]


@pytest.mark.parametrize("given", ABSURD)
def test_a_time_that_there_is_not_is_a_sentence(stack: ServersOfTests, given: str) -> None:
    commands = (["tasks"], ["requeue-dead", "--dry-run"], ["discard-dead"], ["outbox", "requeue-dead", "--dry-run"])
    for command in commands:
        for option in ("--since", "--until"):
            refused = manage(*command, option, given)
            assert refused.code == 2, (command, option)
            assert refused.out == ""
            assert " is no" in " ".join(refused.err.split())


@pytest.mark.parametrize("given", ["700000d", "999999s", "0001-01-01T00:00+14:00", "9999-12-31T23:59-12:00"])
def test_a_time_at_the_edge_of_the_calendar_is_one(stack: ServersOfTests, given: str) -> None:
    for command in (["tasks"], ["requeue-dead", "--dry-run"], ["outbox", "requeue-dead", "--dry-run"]):
        for option in ("--since", "--until"):
            assert manage(*command, option, given, "--json").code == 0


def test_a_place_in_a_list_before_the_first_year_is_none(stack: ServersOfTests) -> None:
    refused = manage("tasks", "--before", f"0001-01-01T00:00+14:00_{NOBODY}")
    assert (refused.code, "is no place in a list" in refused.err) == (2, True)


@pytest.mark.parametrize("given", ["999999d", "99999-01-01", "-5d"])
def test_a_task_for_a_time_that_there_is_not_is_a_sentence(stack: ServersOfTests, given: str) -> None:
    refused = manage("submit", FLAKY, "1", "--run-at", given)
    assert (refused.code, "Traceback" in refused.err, work.rows()) == (2, False, [])
