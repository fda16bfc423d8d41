"""Partition keys: one at a time, in the order of commits, whatever fails, dies or comes twice (P9)."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy.orm import Session

import settings
from models.driver_values import array
from models.engine import engine, sessions
from models.prepared import Prepared
from models.sql import sql
from outbox.after_commit_publisher import submitter
from tasks import Discard, NewTask, Permanent, Snooze, submit, submit_many
from tasks.core.partition_keys import NEXT_SECONDS
from tasks.core.registry import handlers
from tasks.core.task import Task
from tasks.execution.claim import CLAIM
from tasks.execution.claim_partitioned import CLAIM_KEYED
from tasks.operations import dead_tasks
from tasks.operations.task_details import details
from tasks.operations.why_waiting import Seen, reasons
from tasks.recovery import lost_wakeups
from tasks.recovery.prune import prune
from tests.outbox.ledger import move
from tests.servers import ServersOfTests
from tests.tasks.deliveries import claimed_in_turn, clean_sink, delivered, handled, scalar
from tests.tasks.work import insert, rows, task, transitions, wakeups

RAN: list[tuple[str, Any]] = []


@pytest.fixture(autouse=True)
def ledger(stack: ServersOfTests) -> Iterator[ServersOfTests]:
    RAN.clear()
    with clean_sink(), handled("test.keyed", note, batch=10):
        yield stack


def note(each: Task, db: Session) -> None:
    """Does what its payload says, once it has been noted that it ran."""
    insert(each, db)
    RAN.append((each.partition_key or "", each.payload["n"]))
    error = each.payload.get("error")
    if error and each.due_at is None:  # the first time
        raise {"fail": RuntimeError("no"), "die": Permanent("never"), "snooze": Snooze(0), "discard": Discard("old")}[
            error
        ]


def keyed(key: str, count: int = 1, *, first: int = 0, errors: dict[int, str] | None = None) -> list[uuid.UUID]:
    errors = errors or {}
    payloads = [{"n": n, **({"error": errors[n]} if n in errors else {})} for n in range(first, first + count)]
    with sessions().begin() as session:
        made = submit_many(session, [NewTask("test.keyed", one, partition_key=key, max_attempts=3) for one in payloads])
    assert submitter().flush(20)
    return [each.task_id for each in made]


def ran(key: str) -> list[int]:
    return [n for partition, n in RAN if partition == key]


def statuses(ids: list[uuid.UUID]) -> list[str]:
    found = dict(rows("id, status", "id = ANY(:ids)", ids=ids))
    return [found[id_] for id_ in ids]


def woken_since(last: int) -> set[uuid.UUID]:
    return {id_ for wakeup in wakeups(f"id > {last}") for id_ in wakeup.ids}


def last_wakeup() -> int:
    return max((wakeup.id for wakeup in wakeups()), default=0)


@pytest.mark.guarantee
def test_tasks_of_one_key_run_in_the_order_of_their_submits_whatever_order_they_are_delivered_in() -> None:
    ids = keyed("a", 25)
    for _ in range(3):  # a batch holds ten
        for id_ in reversed(ids):
            delivered([id_])
    assert ran("a") == list(range(25))
    assert set(statuses(ids)) == {"SUCCEEDED"}


def test_a_task_behind_another_is_not_due_however_often_it_is_delivered() -> None:
    first, second, third = keyed("a", 3)
    found = claimed_in_turn([third, second])
    assert (found.tasks, found.not_due) == ([], [third, second])
    assert [each.id for each in claimed_in_turn([first]).tasks] == [first, second, third], (
        "the head brings what follows it"
    )


def test_a_batch_takes_consecutive_tasks_of_several_keys_and_shares_its_room_fairly() -> None:
    hot, cold = keyed("hot", 30), keyed("cold", 2)
    found = claimed_in_turn([hot[0], cold[0]])
    by_key = {key: [each.payload["n"] for each in found.tasks if each.partition_key == key] for key in ("hot", "cold")}
    assert by_key == {"hot": list(range(6)), "cold": [0, 1]}


def test_a_run_ends_where_another_type_a_later_time_or_an_isolated_task_stands() -> None:
    ids = keyed("a", 4)
    with engine().begin() as connection:
        connection.execute(sql("UPDATE ledger.ingest_task SET isolated = true WHERE id = :id"), {"id": ids[2]})
    assert [each.id for each in claimed_in_turn(ids).tasks] == ids[:2]


def test_a_gap_that_somebody_locks_ends_the_run_before_it() -> None:
    ids = keyed("a", 4)
    with engine().connect() as somebody:
        somebody.execute(sql("SELECT FROM ledger.ingest_task WHERE id = :id FOR UPDATE"), {"id": ids[1]})
        found = claimed_in_turn(ids)
    assert [each.id for each in found.tasks] == ids[:1]


@pytest.mark.parametrize("error", ["fail", "snooze"])
@pytest.mark.parametrize("place", [0, 3, 9])
def test_the_first_that_does_not_succeed_ends_the_run_and_the_rest_waits_for_it(error: str, place: int) -> None:
    ids = keyed("a", 10, errors={place: error})
    with pytest.MonkeyPatch.context() as quick:
        quick.setenv("INGEST_RETRY_BASE_BACKOFF_MS", "0")
        settings.current.cache_clear()
        delivered(ids)
        assert submitter().flush(20)  # another one belongs to other settings
        settings.current.cache_clear()
    expected = ["SUCCEEDED"] * place + ["RETRYING"] + ["QUEUED"] * (9 - place)
    assert statuses(ids) == expected
    assert {task(id_)["attempt_count"] for id_ in ids[place + 1 :]} <= {0}
    RAN.clear()
    delivered(ids)
    assert ran("a") == list(range(place, 10))
    assert set(statuses(ids)) == {"SUCCEEDED"}


def test_what_is_discarded_makes_way_at_once() -> None:
    ids = keyed("a", 3, errors={1: "discard"})
    delivered(ids)
    assert statuses(ids) == ["SUCCEEDED", "DISCARDED", "SUCCEEDED"]


@pytest.mark.guarantee
def test_a_dead_task_holds_its_key_until_it_is_requeued_or_discarded_and_no_other_key() -> None:
    ids, others = keyed("a", 3, errors={0: "die"}), keyed("b", 1)
    delivered([*ids, *others])
    delivered(ids)
    assert statuses([*ids, *others]) == ["DEAD", "QUEUED", "QUEUED", "SUCCEEDED"]
    last = last_wakeup()
    list(dead_tasks.discard(engine(), dead_tasks.Choice(ids=[ids[0]]), actor="me"))
    assert woken_since(last) == {ids[1]}, "whoever waited for it is woken"
    delivered([ids[1]])
    assert statuses(ids) == ["DISCARDED", "SUCCEEDED", "SUCCEEDED"]


def test_a_dead_task_that_is_pruned_makes_way_and_wakeups_for_whoever_comes_next(
    ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, follows = keyed("a", 2, errors={0: "die"})
    delivered([dead])
    assert statuses([dead, follows]) == ["DEAD", "QUEUED"]
    last = last_wakeup()
    monkeypatch.setenv("INGEST_DEAD_RETENTION_HOURS", "1")
    settings.current.cache_clear()
    move(ledger, 2 * 3600)
    assert prune(engine(), settings.current()).tasks == 1
    assert woken_since(last) == {follows}
    delivered([follows])
    assert statuses([follows]) == ["SUCCEEDED"]


def test_a_dead_task_that_is_requeued_goes_first() -> None:
    ids = keyed("a", 3, errors={0: "die"})
    delivered(ids)
    list(dead_tasks.requeue(engine(), dead_tasks.Choice(ids=[ids[0]]), actor="me"))
    with handled("test.keyed", lambda each, _: RAN.append(("a", each.payload["n"])), batch=10):
        RAN.clear()
        delivered([ids[0]])
    assert ran("a") == [0, 1, 2]


def test_a_handler_may_say_that_the_dead_are_skipped_and_a_requeued_one_comes_last() -> None:
    with handled("test.keyed", note, batch=10, skip_dead=True):
        ids = keyed("a", 3, errors={0: "die"})
        last = last_wakeup()
        delivered(ids)
        assert statuses(ids) == ["DEAD", "SUCCEEDED", "SUCCEEDED"]
        assert woken_since(last) <= set(ids)
        later = keyed("a", 2, first=3)
        list(dead_tasks.requeue(engine(), dead_tasks.Choice(ids=[ids[0]]), actor="me"))
        found = claimed_in_turn([ids[0]])
        assert (found.tasks, found.not_due) == ([], [ids[0]])
        assert [each.id for each in claimed_in_turn([later[0]]).tasks] == [*later, ids[0]]


def test_the_dead_that_are_skipped_wakeup_for_whoever_comes_next() -> None:
    with handled("test.keyed", note, batch=1, skip_dead=True):
        ids = keyed("a", 2, errors={0: "die"})
        last = last_wakeup()
        delivered([ids[0]])
        assert woken_since(last) == {ids[1]}


def test_a_success_wakeups_for_the_next_of_its_key_and_for_nobody_else() -> None:
    with handled("test.keyed", note, batch=1):
        ids = keyed("a", 3)
        last = last_wakeup()
        delivered([ids[0]])
        assert woken_since(last) == {ids[1]}
        assert task(ids[1])["last_wakeup_at"] > task(ids[1])["created_at"]


def test_a_task_that_is_next_in_line_is_woken_once_more_a_little_later() -> None:
    """Its predecessor may be settling at this very moment, and may not have seen it."""
    first, second, third = keyed("a", 3)
    with engine().begin() as connection:
        held = sql("UPDATE ledger.ingest_task SET status = 'RUNNING', lease_token = gen_random_uuid() WHERE id = :id")
        connection.execute(held, {"id": first})
    last = last_wakeup()
    delivered([second, third])
    (wakeup,) = wakeups(f"id > {last}")
    assert wakeup.ids == [second]
    assert wakeup.due_at is not None
    assert (wakeup.due_at - scalar("SELECT ledger.ledger_now()")).total_seconds() == pytest.approx(NEXT_SECONDS, abs=1)


def test_whoever_submits_to_a_key_waits_for_the_commit_of_whoever_did_so_before() -> None:
    done: list[str] = []

    def second() -> None:
        keyed("a", 1, first=1)
        done.append("second")

    with sessions()() as session:
        submit(session, "test.keyed", {"n": 0}, partition_key="a")
        other = threading.Thread(target=second)
        other.start()
        waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        while not scalar(waiting):
            assert other.is_alive(), "it did not wait"
        done.append("first")
        session.commit()
    other.join()
    assert done == ["first", "second"]
    assert [payload["n"] for (payload,) in rows("payload", "true ORDER BY key_seq --")] == [0, 1]


def test_the_order_in_submit_many_is_the_order_given_whatever_the_types_and_chunks() -> None:
    with handled("test.another", note):
        given = [
            NewTask(("test.keyed", "test.another")[n % 2], {"n": n}, partition_key=f"k{n % 3}") for n in range(2500)
        ]
        with sessions().begin() as session:
            submit_many(session, given)
    found = rows("partition_key, payload ->> 'n'", "true ORDER BY key_seq --")
    for key in ("k0", "k1", "k2"):
        order = [int(n) for partition, n in found if partition == key]
        assert order == sorted(order)
        assert len(order) > 800


def test_sql_submits_to_a_key_too_and_refuses_a_bad_one() -> None:
    with engine().begin() as connection:
        first, second = (
            connection.execute(
                sql("SELECT ledger.ingest_submit('test.keyed', CAST(:payload AS jsonb), partition_key => 'a')"),
                {"payload": f'{{"n": {n}}}'},
            ).scalar_one()
            for n in range(2)
        )
    delivered([second, first])
    assert ran("a") == [0, 1]
    with pytest.raises(Exception, match="A partition key is text"), engine().begin() as connection:
        connection.execute(sql("SELECT ledger.ingest_submit('test.keyed', '{}', partition_key => '')"))


def test_a_hundred_thousand_waiting_tasks_of_one_key_are_in_nobodys_way() -> None:
    """What a claim reads does not grow with them: neither that of another key, nor that of tasks without a key."""
    many = sql("""
        INSERT INTO ledger.ingest_task (id, type, payload, context, partition_key, key_seq, last_wakeup_at)
        SELECT gen_random_uuid(), 'test.keyed', '{"n": 1}', '{}', 'hot', nextval('ledger.ingest_task_key_seq'),
               (SELECT ledger.ledger_now()) FROM generate_series(1, 100000)""")
    with engine().begin() as connection:
        connection.execute(many)
        connection.execute(sql("ANALYZE ingest_task"))
    (cold,) = keyed("cold")
    (head, behind) = (scalar(f"SELECT id FROM ledger.ingest_task WHERE partition_key = 'hot' ORDER BY key_seq {way} LIMIT 1")
                      for way in ("ASC", "DESC"))  # fmt: skip
    with sessions().begin() as session:
        plain = submit(session, "test.keyed", {"n": 7}).task_id
    assert max(rows_read(CLAIM_KEYED, [id_]) for id_ in (cold, head, behind)) < 100
    assert rows_read(CLAIM, [plain]) < 20
    delivered([plain, cold])
    assert statuses([plain, cold]) == ["SUCCEEDED"] * 2


def rows_read(statement: Prepared, ids: list[uuid.UUID]) -> int:
    """Rows of tasks that a claim of these ids looks at, thrown away ones included."""
    values: dict[str, Any] = {
        "ids": array(ids),
        "types": "{test.keyed}",
        "batches": "{10}",
        "relaxed": "{t}",
        "skipping": "{}",
    }
    values |= {"token": str(uuid.uuid4()), "holder": "me", "lease_seconds": 60}
    with engine().connect() as connection:
        explain = sql(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement.text}")
        plan: Any = connection.execute(explain, values).scalar_one()[0]["Plan"]
        connection.rollback()
    return sum(_read(plan))


def _read(node: dict[str, Any]) -> Iterator[int]:
    if node.get("Relation Name") == "ingest_task" and "Scan" in node["Node Type"]:
        yield int((node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"])
    for below in node.get("Plans", ()):
        yield from _read(below)


def test_the_wakeup_of_a_head_that_was_lost_is_noticed_and_that_of_those_behind_it_is_not(
    stack: ServersOfTests,
) -> None:
    a, b = keyed("a", 3), keyed("b", 2)
    move(stack, 3600)
    last = last_wakeup()
    assert lost_wakeups.wake_again(engine(), settings.current(), depths=lambda queues: dict.fromkeys(queues, 0)) == 2
    assert woken_since(last) == {a[0], b[0]}
    assert transitions(a[0]) == [(None, "QUEUED")]


def test_all_keys_are_looked_at_in_turn_when_there_are_more_than_one_look_takes(stack: ServersOfTests) -> None:
    heads = [keyed(f"key {n:02}")[0] for n in range(5)]
    move(stack, 3600)
    with pytest.MonkeyPatch.context() as small:
        small.setenv("INGEST_RECLAIM_BATCH_SIZE", "2")
        settings.current.cache_clear()
        woken: set[uuid.UUID] = set()
        for _ in range(3):
            last = last_wakeup()
            lost_wakeups.wake_again(engine(), settings.current(), depths=lambda queues: dict.fromkeys(queues, 0))
            woken |= woken_since(last)
        assert submitter().flush(20)
        settings.current.cache_clear()
    assert woken == set(heads)


def test_show_names_what_stands_before_a_task() -> None:
    ids = keyed("a", 4, errors={0: "die"})
    delivered([ids[0]])
    with engine().connect() as connection:
        found = details(connection, ids[3])
    assert found.blocker is not None
    assert (found.blocker.task_id, found.blocker.ahead, found.blocker.status) == (ids[0], 3, "DEAD")
    look = lambda _queue: Seen(0, frozenset({"w"}))  # noqa: E731
    (why,) = reasons(found, settings.current(), known_types=handlers(), look=look)
    assert why.code == "not_its_turn"
    assert f"behind 3 others of its partition key 'a'; the first is {ids[0]}" in why.message
    assert "requeue-dead" in why.message
