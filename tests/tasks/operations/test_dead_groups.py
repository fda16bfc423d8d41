"""Dead tasks are grouped by type and error: what counts as the same error, and what a group says."""

from __future__ import annotations

import uuid
from datetime import UTC, timedelta
from typing import Any

import pytest

from models.clock import now
from models.engine import engine
from models.errors import Misuse
from models.sql import sql
from tasks.execution.deliver import deliver
from tasks.operations import dead_groups
from tasks.operations.dead_groups import DeadGroups, GroupKey, GroupOrder
from tasks.operations.dead_mutes import MUTE_DAYS, MuteEnd, mute_group, read_mutes, unmute_group
from tests.outbox.ledger import move
from tests.servers import ServersOfTests
from tests.tasks.command_line import buried, change, dead, manage, submitted
from tests.tasks.deliveries import scalar
from tests.tasks.lost_workers import killed, reclaim_lost

pytestmark = pytest.mark.usefixtures("stack")

# Errors in one line are the same error.
SAME = [
    ("The file has 3 rows.", "The file has 1204 rows.", "The file has 1,204 rows.", "The file has 0.5 rows."),
    ("Order 8c2d1f3e-9b7a-4c1d-8e2f-0123456789ab is gone.", "Order abcdefab-cdef-4abc-bcde-abcdefabcdef is gone."),
    ("No such hash deadbeef01.", "No such hash 77."),
    ('No column "name".', 'No column "a longer one".', "No column 'name'."),
    ("Can't open 'a.txt'.", "Can't open 'b.txt'."),
    ("It's the server's fault: 'x'", "It's the server's fault: 'y z'"),
    ("<Order object at 0x7f21aa>", "<Order object at 0x7e9912>"),
]
# No two of these are.
DIFFERENT = [
    "The server answered 503.",
    "The server does not answer.",
    "The server answered 503 twice.",
    "No column 'name'.",
    "No table 'name'.",
    "Can't open 'a.txt'.",
    "Can't close 'a.txt'.",
    "It is dead.",
    "It is bad.",
    "",
]


def groups(order: GroupOrder = GroupOrder.LAST) -> DeadGroups:
    with engine().connect() as connection:
        return dead_groups.list_groups(connection, order)


def fingerprint(message: str, error_code: str = "handler_error") -> str | None:
    task_id = buried(1, error_message=message, error_code=error_code)[0]
    return fingerprints([task_id])[0]


def fingerprints(ids: list[uuid.UUID]) -> list[str | None]:
    with engine().connect() as connection:
        statement = sql("SELECT error_fingerprint FROM ledger.ingest_task WHERE id = ANY(:ids)")
        return list(connection.execute(statement, {"ids": ids}).scalars())


def wrong_fingerprints() -> int:
    """Return how many tasks have another fingerprint than that of their error."""
    return int(
        scalar("""
            SELECT count(*) FROM ledger.ingest_task
            WHERE error_fingerprint IS DISTINCT FROM ledger.ingest_error_fingerprint(error_code, error_message)
        """)
    )


def died(count: int, *, hours_ago: float = 0.0, **columns: Any) -> list[uuid.UUID]:
    """Insert tasks that died some hours ago."""
    ids = buried(count, **columns)
    change(ids, "finished_at = finished_at - make_interval(secs => :seconds)", seconds=hours_ago * 3600)
    return ids


def summary(found: DeadGroups) -> list[tuple[str, int]]:
    return [(each.key.type, each.dead.count) for each in found.groups]


def test_a_failure_writes_its_fingerprint_and_a_success_clears_it(stack: ServersOfTests) -> None:
    (once,), (died_,) = submitted({"fail": 1}), dead()
    deliver(engine(), [once])
    (lost,) = submitted({})
    killed([lost], "ingest.after_claim=kill")
    assert reclaim_lost(stack).charged == 1
    assert all(fingerprints([once, died_, lost]))
    assert wrong_fingerprints() == 0
    change([once], "next_retry_at = ledger.ledger_now()")
    deliver(engine(), [once])
    assert fingerprints([once]) == [None]
    assert wrong_fingerprints() == 0


@pytest.mark.parametrize("messages", SAME, ids=lambda messages: messages[0])
def test_errors_that_differ_only_in_numbers_ids_and_quoted_words_are_one_group(messages: tuple[str, ...]) -> None:
    assert len({fingerprint(each) for each in messages}) == 1
    assert [each.dead.count for each in groups().groups] == [len(messages)]


def test_a_uuid_is_replaced_whichever_digits_it_has() -> None:
    assert len({fingerprint(f"Order {uuid.uuid4()} is gone.") for _ in range(200)}) == 1


def test_different_errors_types_and_error_codes_are_different_groups() -> None:
    assert len({fingerprint(each) for each in DIFFERENT}) == len(DIFFERENT)
    assert fingerprint("It is dead.", "timeout") not in {fingerprint(each) for each in DIFFERENT}
    assert {each.key.type for each in groups().groups} == {"demo.flaky"}
    buried(1, type="another.type", error_message=DIFFERENT[0])
    assert len(groups().groups) == len(DIFFERENT) + 2


def test_a_group_says_how_many_tasks_are_dead_and_since_when() -> None:
    died(2, hours_ago=30, error_message="no 1")
    died(3, hours_ago=1, error_message="no 2")
    died(4, hours_ago=2, type="another.type")
    submitted({})
    (flaky, another) = groups().groups
    with engine().connect() as connection:
        at = now(connection)
    assert (flaky.key.type, flaky.dead.count, flaky.dead.exact) == ("demo.flaky", 5, True)
    assert at - flaky.first_at == pytest.approx(timedelta(hours=30), abs=timedelta(seconds=30))
    assert at - flaky.last_at == pytest.approx(timedelta(hours=1), abs=timedelta(seconds=30))
    assert another.first_at == another.last_at
    assert summary(groups(GroupOrder.COUNT)) == [("demo.flaky", 5), ("another.type", 4)]
    died(1, type="another.type")
    assert summary(groups()) == [("another.type", 5), ("demo.flaky", 5)]


def test_the_sum_of_the_groups_is_the_number_of_dead_tasks_in_stats(known_handlers: None) -> None:
    dead({"permanent": "no 1"}, {"permanent": "no 2"}, {"permanent": "never"})
    buried(4, error_message=None, last_error=None, error_code=None)
    deliver(engine(), submitted({}))
    found = groups()
    (stats,) = [each for each in manage("stats", "--json").json["statuses"] if each["status"] == "DEAD"]
    assert (found.dead.count, found.dead.exact) == (stats["count"], stats["exact"]) == (7, True)
    assert sum(each.dead.count for each in found.groups) == 7
    assert (found.total, sorted(each.dead.count for each in found.groups)) == (3, [1, 2, 4])


def test_tasks_that_died_without_an_error_are_a_group_of_their_own() -> None:
    ids = buried(2, error_message=None, last_error=None, error_code=None)
    buried(1, type="z")
    key = GroupKey("demo.flaky", "")
    assert key in [each.key for each in groups().groups]
    with engine().connect() as connection:
        (counted,) = dead_groups.count_groups(connection, [key])
        latest = dead_groups.read_latest(connection, [key], limit=5)[key]
        deaths = dead_groups.read_deaths(connection, [key], "day", now(connection) - timedelta(days=2))[key]
    assert counted.dead.count == 2
    assert {each.task_id for each in latest} == set(ids)
    assert sum(deaths.counts.values()) == 2


def test_above_the_ceiling_every_group_is_found_and_large_ones_are_counted_in_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for type_ in ("a", "b", "c"):
        died(2, type=type_, error_message="one")
        died(1, type=type_, error_message="two", hours_ago=1)
        buried(1, type=type_, error_message=None, last_error=None, error_code=None)
    died(40, type="d", hours_ago=2)
    complete = groups()
    monkeypatch.setattr(dead_groups, "CEILING", 30)
    found = groups()
    assert {each.key for each in found.groups} == {each.key for each in complete.groups}
    assert found.total == complete.total == 10
    assert not found.dead.exact
    assert [each.last_at for each in found.groups] == sorted((each.last_at for each in complete.groups), reverse=True)
    counted = {each.key: each for each in found.groups}
    for each in complete.groups:
        assert (counted[each.key].first_at, counted[each.key].last_at) == (each.first_at, each.last_at)
        is_large = each.dead.count > 2
        assert counted[each.key].dead.exact is not is_large
        assert counted[each.key].dead.count == (3 if is_large else each.dead.count)
    assert groups(GroupOrder.COUNT).groups[0].key.type == "d"


def test_deaths_are_counted_by_the_hour_and_by_the_day() -> None:
    died(3)
    died(2, hours_ago=2)
    died(4, hours_ago=50)
    (group,) = groups().groups
    key, at = group.key, group.last_at
    with engine().connect() as connection:
        hours = dead_groups.read_deaths(connection, [key], "hour", at - timedelta(hours=24))[key]
        days = dead_groups.read_deaths(connection, [key], "day", at - timedelta(days=29))[key]
        some = dead_groups.read_deaths(connection, [key], "day", at - timedelta(days=29), ceiling=4)[key]
    hour = at.replace(minute=0, second=0, microsecond=0).astimezone(UTC)
    assert hours.counts == {hour: 3, hour - timedelta(hours=2): 2}
    assert (hours.exact, days.exact, some.exact) == (True, True, False)
    assert sum(days.counts.values()) == 9
    assert all((start.hour, start.tzinfo) == (0, UTC) for start in days.counts)
    assert sum(some.counts.values()) == 4


def test_a_mute_can_be_replaced_and_ended(stack: ServersOfTests) -> None:
    key = GroupKey("demo.flaky", "abc")
    mute_group(engine(), key, end=MuteEnd.UNMUTED, reason=" known \x00", actor="ann")
    mute_group(engine(), GroupKey("z", ""), end=MuteEnd.UNMUTED, reason="too", actor="bob")
    mute_group(engine(), key, end=MuteEnd.DAYS, reason="still", actor="bob")
    with engine().connect() as connection:
        mutes = read_mutes(connection)
    assert list(mutes) == [key, GroupKey("z", "")]
    mute = mutes[key]
    assert (mute.reason, mute.actor, mute.until_next_death) == ("still", "bob", False)
    assert mute.expires_at == mute.since + timedelta(days=MUTE_DAYS)
    assert unmute_group(engine(), GroupKey("z", ""))
    assert not unmute_group(engine(), GroupKey("z", ""))
    move(stack, MUTE_DAYS * 86_400 + 1)
    with engine().connect() as connection:
        assert read_mutes(connection) == {}


def test_a_mute_until_the_next_death_ends_with_it() -> None:
    buried(1)
    (group,) = groups().groups
    mute_group(engine(), group.key, end=MuteEnd.NEXT_DEATH, reason="known", actor="ann")
    mute_group(engine(), GroupKey("z", ""), end=MuteEnd.UNMUTED, reason="known", actor="ann")
    with engine().connect() as connection:
        mutes = read_mutes(connection)
    assert not mutes[group.key].is_over(group.last_at)
    assert not mutes[group.key].is_over(None)
    buried(1)
    (again,) = groups().groups
    assert mutes[group.key].is_over(again.last_at)
    assert not mutes[GroupKey("z", "")].is_over(again.last_at)


@pytest.mark.parametrize("reason", ["", "  ", "x" * 501])
def test_a_mute_needs_a_reason(reason: str) -> None:
    with pytest.raises(Misuse, match="Say why"):
        mute_group(engine(), GroupKey("t", ""), end=MuteEnd.UNMUTED, reason=reason, actor="ann")
