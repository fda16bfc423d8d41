"""Test `manage.py bench receipts`: its arithmetic, that nothing is lost, and that it cleans up."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psycopg2
import pytest

from bench import busy_postgres
from bench.receipt_chat import MODES, Chat, Record, Sent, plan, summarize, too_early
from bench.receipt_load import ACCEPTED, SAVED, Answer, Load, Waits, percentile
from bench.receipt_outage import Outage, Sustained
from bench.receipts import BUSY, IDLE, SLOW_COMMITS, TURNS, Condition, Found, goals
from commands.bench_receipts import _print_chats, _print_conditions, _print_saving
from embedded.postgres import Postgres
from settings import ROOT
from tests.bench.test_bench_ingest import numbers, still_running
from tests.servers import ServersOfTests, wait_until

CHAT = Chat(
    "saved before delivery",
    clients=3,
    messages=9,
    errors=0,
    lost=0,
    repeated=0,
    accepted=Waits(1, 2),
    saved=Waits(3, 4),
    arrived=Waits(5, 6),
    reorders={"reorder": 7, "reorderByServerMsgId": 8, "reorderByFrom": 0},
)


def condition(name: str, accepted: float, saved: float) -> Condition:
    turns = {ACCEPTED: [Waits(1, accepted)] * TURNS, SAVED: [Waits(2, saved)] * TURNS}
    return Condition.of(name, turns, {ACCEPTED: 900, SAVED: 300})


FOUND = Found(
    rate=100,
    conditions=[condition(IDLE, 4, 8), condition(BUSY, 9, 10), condition(SLOW_COMMITS, 7, 28)],
    sustained=Sustained(60, 450, Waits(4, 9), lag_p50_seconds=0.1, lag_p99_seconds=1.01),
    outage=Outage(
        30,
        received=10_000,
        refused=1,
        added=500,
        accepted=Waits(4, 9),
        backlog=9000,
        first_save_seconds=2,
        drain_per_second=6000,
        bare_per_second=10_000,
        without_redis_per_second=8000,
        drain_ratio=0.6,
        without_redis_ratio=0.75,
        lost=0,
        doubled=1,
    ),
    chats=[CHAT, dataclasses.replace(CHAT, mode="delivered before saved", lost=1)],
)


def test_a_goal_is_met_when_it_is_reached_exactly_and_missed_just_beyond() -> None:
    assert [goal.what for goal in goals(FOUND) if not goal.is_met] == [
        "save lag at half the highest rate, p99 s",
        "tasks doubled in an outage",
        "chat, delivered before saved: lost receipts and messages",
    ]


def test_one_disturbed_turn_does_not_decide_about_a_ratio() -> None:
    turns = {ACCEPTED: [Waits(1, 5), Waits(1, 500), Waits(1, 5)], SAVED: [Waits(2, 20)] * 3}
    found = Condition.of(IDLE, turns, {ACCEPTED: 900, SAVED: 300})
    assert (found.accepted.p99_ms, found.p99_ratio, found.p50_ratio, found.rate_ratio) == (5, 0.25, 0.5, 3)


def test_a_percentile_does_not_leave_out_the_slowest_of_a_hundred() -> None:
    assert percentile([float(wait) for wait in range(100)], 0.99) == 99


def test_a_request_that_failed_makes_the_measurement_fail() -> None:
    load = Load([Answer(1, 202, b"{}", 1.0), Answer(2, 503, b"down", 1.0)], 1.0)
    with pytest.raises(Exception, match="1 requests failed, such as 503: down"):
        load.require_all()


def test_a_message_is_too_early_if_one_that_was_sent_before_it_arrives_later() -> None:
    assert [too_early(places) for places in ([], [1, 2, 2, 3], [2, 1], [3, 1, 2], [2, 3, 1])] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("count", [2, 3, 4, 5, 10])
def test_neighbours_send_to_the_same_receiver_at_the_same_time_and_never_to_themselves(count: int) -> None:
    plans = {(place, pair): plan(place, pair, count) for place in range(count) for pair in range(4)}
    assert all(0 <= receiver < count and receiver != place for (place, _), (receiver, _) in plans.items())
    if count > 4:
        assert plans[0, 1] == plans[1, 1] == plans[2, 1] != plans[3, 1]


def frame(kind: str, id_: str, *, ack: str | None = None, accepted_at: str = "") -> str:
    return json.dumps(
        {"type": kind, "ackType": ack, "clientMsgId": id_, "body": json.dumps({"acceptedAt": accepted_at})}
    )


def test_the_orders_of_arrival_are_compared_with_sending_acceptance_and_each_sender() -> None:
    record = Record()
    record.sent = {"a1": Sent("ann", "eve", 1, 0.1), "b1": Sent("bob", "eve", 1, 0.2), "a2": Sent("ann", "eve", 2, 0.3)}
    for user, ids in (("ann", {"a1": "2026-01-01T01", "a2": "2026-01-01T03"}), ("bob", {"b1": "2026-01-01T02"})):
        for id_, at in ids.items():
            record.received[user] += [
                (1.0, frame("ACK", id_, ack="accepted", accepted_at=at)),
                (2.0, frame("ACK", id_, ack="saved")),
            ]
    record.received["eve"] += [(3.0, frame("SINGLE_CHAT", id_)) for id_ in ("b1", "a2", "a1", "a1")]
    found = summarize("saved before delivery", 3, record)
    assert found.reorders == {"reorder": 2, "reorderByServerMsgId": 2, "reorderByFrom": 1}
    assert (found.messages, found.errors, found.lost, found.repeated) == (3, 0, 0, 1)
    record.received["eve"].pop(2)
    record.received["eve"].pop(2)
    record.received["bob"].append((4.0, frame("ERROR", "b1")))
    found = summarize("saved before delivery", 3, record)
    assert (found.errors, found.lost) == (1, 1)


def test_every_figure_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    _print_conditions(FOUND.conditions, FOUND.rate)
    _print_saving(FOUND.sustained, FOUND.outage)
    _print_chats(FOUND.chats)
    printed = capsys.readouterr().out
    for expected in ("commits 20 ms slower", "1.010", "10,000", "60%", "75%", "reorderByServerMsgId", "5.0 and 6.0"):
        assert expected in printed


@pytest.mark.parametrize("has_pgbench", [True, False])
def test_the_load_keeps_postgresql_busy_until_the_end(
    servers: ServersOfTests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_pgbench: bool
) -> None:
    postgres = servers.cluster.server
    assert isinstance(postgres, Postgres)
    if not has_pgbench:
        monkeypatch.setattr(busy_postgres, "find_pgbench", lambda: None)
    table = "pgbench_history" if has_pgbench else "account_history"
    url = postgres.url(database=busy_postgres.DATABASE)
    with busy_postgres.busy_postgres(postgres, tmp_path):
        wait_until(lambda: rows_of(url, table) > 0, f"the load writes to {table}", seconds=20)
    wait_until(lambda: connections_to(postgres) == 0, "the load has disconnected", seconds=20)


def connections_to(postgres: Postgres) -> int:
    connection = psycopg2.connect(postgres.url(database="postgres"))
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE datname = %s", (busy_postgres.DATABASE,))
            (count,) = cursor.fetchone() or (0,)
            return int(count)
    finally:
        connection.close()


def rows_of(url: str, table: str) -> int:
    """Return the number of rows; 0 while there is no such table."""
    connection = psycopg2.connect(url)
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT to_regclass(%s)", (table,))
            if cursor.fetchall() == [(None,)]:
                return 0
            cursor.execute(f"SELECT count(*) FROM {table}")
            return int(cursor.fetchall()[0][0])
    finally:
        connection.close()


def measured(temporary: Path, variables: Mapping[str, str] | None = None, **options: float) -> dict[str, Any]:
    """Run the bench as a program; return what it prints."""
    given = [f"--{name.replace('_', '-')}={value:g}" for name, value in options.items()]
    done = subprocess.run(
        [sys.executable, str(ROOT / "manage.py"), "bench", "receipts", *given, "--json"],
        env={**os.environ, **(variables or {}), "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    output: dict[str, Any] = json.loads(done.stdout)
    return output


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bench_receipts_measures_everything_loses_nothing_and_cleans_up(temporary: Path) -> None:
    few = {
        "seconds": 1,
        "rate": 50,
        "sustained_seconds": 2,
        "outage_seconds": 3,
        "backlog": 5000,
        "clients": 6,
        "messages": 8,
    }
    output = measured(temporary, {"RECEIPT_BATCH_SIZE": "50"}, **few)  # a short outage must leave several batches
    found = output["found"]
    assert found.keys() == {field.name for field in dataclasses.fields(Found)}
    assert [each["name"] for each in found["conditions"]] == [IDLE, BUSY, SLOW_COMMITS]
    assert min(numbers(found["conditions"])) > 0
    assert min(numbers(found["sustained"])) > 0
    outage = found["outage"]
    assert [outage.pop(name) for name in ("refused", "lost", "doubled")] == [0, 0, 0]
    assert min(numbers(outage)) > 0
    assert [chat["mode"] for chat in found["chats"]] == list(MODES)
    for chat in found["chats"]:
        assert [chat[name] for name in ("messages", "errors", "lost")] == [48, 0, 0]
        assert chat["reorders"].keys() == {"reorder", "reorderByServerMsgId", "reorderByFrom"}
        assert chat["reorders"]["reorderByFrom"] == 0
    assert len(output["goals"]) == 11
    assert still_running(temporary) == []
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_accepted_is_fast_while_commits_are_slow_and_saving_keeps_up(temporary: Path) -> None:
    """The drain is measured, and not judged here: its ratio depends on what else the machine does."""
    goals = measured(temporary, sustained_seconds=30, outage_seconds=15, clients=200, messages=6)["goals"]
    missed = [goal for goal in goals if (goal["reached"] > goal["wanted"] if goal["at_most"] else False)]
    assert missed == [], json.dumps(goals, indent=1)
