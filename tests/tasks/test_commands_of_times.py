"""Times that an operator reads and types: one time zone in both directions, and nothing that the calendar lacks."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text

from models.engine import engine
from tasks.ingest import ingest
from tests.outbox.ledger import insert
from tests.servers import ServersOfTests
from tests.tasks import work
from tests.tasks.door import dead, manage, statuses, submitted

PRINTED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")
IN_JSON = re.compile(r'"(\d{4}-\d\d-\d\dT[^"_]*)"')


@pytest.fixture
def in_shanghai(stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever connects from here has another time zone than UTC."""
    monkeypatch.setenv("PGTZ", "Asia/Shanghai")
    with engine().connect() as connection:
        assert connection.execute(text("SHOW timezone")).scalar() == "Asia/Shanghai"


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
        connection.execute(text("UPDATE ingest_task SET finished_at = date_trunc('second', finished_at)"))
    (at,) = re.findall(r"finished +(.+ UTC)", manage("show", task).out)
    assert at in manage("show", task).out.partition("why it is not running")[2]  # the sentence says the same
    for copied in (at, at.removesuffix(" UTC")):
        assert manage("discard-dead", "--until", copied, "--json").json["done"] == 0
        assert manage("requeue-dead", "--since", copied, "--dry-run", "--json").json["total"] == 1
    assert statuses([task]) == ["DEAD"]
    assert work.task(task)["finished_at"] == datetime.fromisoformat(at.replace(" UTC", "+00:00"))
