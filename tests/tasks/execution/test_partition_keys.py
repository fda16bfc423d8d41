"""Tasks of one partition key run one at a time, in the order of commits, whatever fails or is delivered twice."""

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
from models.prepared_statements import Prepared
from models.sql import sql
from outbox.after_commit_publisher import after_commit_publisher
from tasks import Discard, NewTask, Permanent, Snooze, submit, submit_many
from tasks.core import batch_size
from tasks.core.partition_keys import NEXT_SECONDS
from tasks.core.registry import handlers
from tasks.core.task import Task
from tasks.execution import deliver as deliver_module
from tasks.execution.claim_statements import CLAIM, CLAIM_KEYED
from tasks.operations import dead_tasks
from tasks.operations.task_details import read_details
from tasks.operations.why_waiting import QueueState, reasons
from tasks.recovery import lost_wakeups
from tasks.recovery.prune import prune
from tests.outbox.ledger import move
from tests.servers import ServersOfTests
from tests.tasks import plans
from tests.tasks.deliveries import claimed_in_turn, delivered, handled, scalar
from tests.tasks.wakeup_repair import repair_lost_wakeups
from tests.tasks.work import insert, rows, task, transitions, wakeups

RAN: list[tuple[str, Any]] = []
pytestmark = pytest.mark.usefixtures("known_handlers")


@pytest.fixture(autouse=True)
def keyed_handler(ledger: ServersOfTests) -> Iterator[None]:
    RAN.clear()
    with handled("test.keyed", note, batch=10):
        yield


def note(each: Task, db: Session) -> None:
    """Record that the task ran, then raise the error that its payload asks for, once."""
    insert(each, db)
    RAN.append((each.partition_key or "", each.payload["n"]))
    error = each.payload.get("error")
    if error and each.due_at is None:  # None in the first attempt only
        raise {"fail": RuntimeError("no"), "die": Permanent("never"), "snooze": Snooze(0), "discard": Discard("old")}[
            error
        ]


def keyed(key: str, count: int = 1, *, first: int = 0, errors: dict[int, str] | None = None) -> list[uuid.UUID]:
    errors = errors or {}
    payloads = [{"n": n, **({"error": errors[n]} if n in errors else {})} for n in range(first, first + count)]
    with sessions().begin() as session:
        made = submit_many(session, [NewTask("test.keyed", one, partition_key=key, max_attempts=3) for one in payloads])
    assert after_commit_publisher().wait_until_idle(20)
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
def test_a_process_holds_few_keys_at_once_and_fills_its_batch_with_the_tasks_behind_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While it holds a key, other processes can do nothing for it."""
    monkeypatch.setattr(deliver_module, "KEYED_AT_ONCE", 2)
    held: set[tuple[int, int]] = set()

    def note_lease(_task: Task, db: Session) -> None:
        (size,) = db.execute(sql("SELECT cardinality(task_ids) FROM ledger.task_lease")).scalars()
        keys = sql("SELECT count(DISTINCT partition_key) FROM ledger.ingest_task WHERE status = 'RUNNING'")
        held.add((size, db.execute(keys).scalar_one()))

    with handled("test.keyed", note_lease, batch=10):
        delivered(keyed("the first one runs alone"))
        held.clear()
        ids = [keyed(f"key {n}", 3) for n in range(5)]
        delivered([first for first, *_ in ids])
    assert held == {(6, 2), (3, 1)}
    assert {status for some in ids for status in statuses(some)} == {"SUCCEEDED"}


def test_keys_that_a_slow_process_has_not_claimed_yet_are_left_to_other_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deliver_module, "KEYED_AT_ONCE", 2)
    batch_size.record_duration(handlers()["test.keyed"], 10.0)
    ids = [keyed(f"key {n}")[0] for n in range(5)]
    before = len(wakeups())
    delivered(ids)
    assert sorted(statuses(ids)) == ["QUEUED"] * 4 + ["SUCCEEDED"]
    waiting = {id_ for id_, status in zip(ids, statuses(ids), strict=True) if status == "QUEUED"}
    assert {id_ for wakeup in wakeups()[before:] for id_ in wakeup.ids} == waiting


def test_tasks_of_one_key_run_in_the_order_of_submits_in_whatever_order_they_are_delivered() -> None:
    ids = keyed("a", 25)
    for _ in range(3):  # a batch has ten tasks
        for id_ in reversed(ids):
            delivered([id_])
    assert ran("a") == list(range(25))
    assert set(statuses(ids)) == {"SUCCEEDED"}


def test_a_task_behind_another_is_not_claimed_however_often_it_is_delivered() -> None:
    first, second, third = keyed("a", 3)
    found = claimed_in_turn([third, second])
    assert (found.tasks, found.not_due) == ([], [third, second])
    found = claimed_in_turn([first])
    assert [each.id for each in found.tasks] == [first, second, third], "the tasks behind the head fill the batch"


def test_a_batch_takes_consecutive_tasks_of_several_keys_evenly() -> None:
    hot, cold = keyed("hot", 30), keyed("cold", 2)
    found = claimed_in_turn([hot[0], cold[0]])
    by_key = {key: [each.payload["n"] for each in found.tasks if each.partition_key == key] for key in ("hot", "cold")}
    assert by_key == {"hot": list(range(6)), "cold": [0, 1]}


def test_a_batch_of_a_key_ends_before_an_isolated_task() -> None:
    ids = keyed("a", 4)
    with engine().begin() as connection:
        connection.execute(sql("UPDATE ledger.ingest_task SET isolated = true WHERE id = :id"), {"id": ids[2]})
    assert [each.id for each in claimed_in_turn(ids).tasks] == ids[:2]


def test_a_batch_of_a_key_ends_before_a_locked_task() -> None:
    ids = keyed("a", 4)
    with engine().connect() as other:
        other.execute(sql("SELECT FROM ledger.ingest_task WHERE id = :id FOR UPDATE"), {"id": ids[1]})
        found = claimed_in_turn(ids)
    assert [each.id for each in found.tasks] == ids[:1]


@pytest.mark.parametrize("error", ["fail", "snooze"])
@pytest.mark.parametrize("place", [0, 3, 9])
def test_after_a_task_that_does_not_succeed_the_rest_of_its_key_is_released(error: str, place: int) -> None:
    ids = keyed("a", 10, errors={place: error})
    with pytest.MonkeyPatch.context() as quick:
        quick.setenv("INGEST_RETRY_BASE_BACKOFF_MS", "0")
        settings.current.cache_clear()
        delivered(ids)
        assert after_commit_publisher().wait_until_idle(20)  # with other settings, there is another publisher
        settings.current.cache_clear()
    expected = ["SUCCEEDED"] * place + ["RETRYING"] + ["QUEUED"] * (9 - place)
    assert statuses(ids) == expected
    assert {task(id_)["attempt_count"] for id_ in ids[place + 1 :]} <= {0}
    RAN.clear()
    delivered(ids)
    assert ran("a") == list(range(place, 10))
    assert set(statuses(ids)) == {"SUCCEEDED"}


def test_a_discarded_task_does_not_block_its_key() -> None:
    ids = keyed("a", 3, errors={1: "discard"})
    delivered(ids)
    assert statuses(ids) == ["SUCCEEDED", "DISCARDED", "SUCCEEDED"]


@pytest.mark.guarantee
def test_a_dead_task_blocks_its_own_key_until_it_is_discarded() -> None:
    ids, others = keyed("a", 3, errors={0: "die"}), keyed("b", 1)
    delivered([*ids, *others])
    delivered(ids)
    assert statuses([*ids, *others]) == ["DEAD", "QUEUED", "QUEUED", "SUCCEEDED"]
    last = last_wakeup()
    list(dead_tasks.discard(engine(), dead_tasks.Choice(ids=[ids[0]]), actor="me"))
    assert woken_since(last) == {ids[1]}, "the next task of the key must be woken"
    delivered([ids[1]])
    assert statuses(ids) == ["DISCARDED", "SUCCEEDED", "SUCCEEDED"]


def test_pruning_a_dead_task_unblocks_its_key_and_wakes_the_next_task(
    ledger: ServersOfTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, following = keyed("a", 2, errors={0: "die"})
    delivered([dead])
    assert statuses([dead, following]) == ["DEAD", "QUEUED"]
    last = last_wakeup()
    monkeypatch.setenv("INGEST_DEAD_RETENTION_HOURS", "1")
    settings.current.cache_clear()
    move(ledger, 2 * 3600)
    assert prune(engine(), settings.current()).tasks == 1
    assert woken_since(last) == {following}
    delivered([following])
    assert statuses([following]) == ["SUCCEEDED"]


def test_a_requeued_task_runs_before_the_tasks_that_it_blocked() -> None:
    ids = keyed("a", 3, errors={0: "die"})
    delivered(ids)
    list(dead_tasks.requeue(engine(), dead_tasks.Choice(ids=[ids[0]]), actor="me"))
    with handled("test.keyed", lambda each, _: RAN.append(("a", each.payload["n"])), batch=10):
        RAN.clear()
        delivered([ids[0]])
    assert ran("a") == [0, 1, 2]


def test_with_skip_dead_a_dead_task_is_skipped_and_runs_last_when_it_is_requeued() -> None:
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


def test_a_skipped_dead_task_wakes_the_next_of_its_key() -> None:
    with handled("test.keyed", note, batch=1, skip_dead=True):
        ids = keyed("a", 2, errors={0: "die"})
        last = last_wakeup()
        delivered([ids[0]])
        assert woken_since(last) == {ids[1]}


def test_a_success_wakes_only_the_next_task_of_its_key() -> None:
    with handled("test.keyed", note, batch=1):
        ids = keyed("a", 3)
        last = last_wakeup()
        delivered([ids[0]])
        assert woken_since(last) == {ids[1]}
        assert task(ids[1])["last_wakeup_at"] > task(ids[1])["created_at"]


def test_the_next_task_of_a_key_is_woken_again_a_little_later() -> None:
    """Its predecessor may be settling at this moment without seeing it."""
    first, second, third = keyed("a", 3)
    with engine().begin() as connection:
        held = sql("UPDATE ledger.ingest_task SET status = 'RUNNING', lease_token = gen_random_uuid() WHERE id = :id")
        connection.execute(held, {"id": first})
    last = last_wakeup()
    delivered([second, third])
    (wakeup,) = wakeups(f"id > {last}")
    assert wakeup.ids == [second]
    assert wakeup.due_at is not None
    written_at = scalar("SELECT created_at FROM ledger.outbox_event WHERE id = :id", id=wakeup.id)
    waited = (written_at - task(second)["updated_at"]).total_seconds()
    assert (wakeup.due_at - written_at).total_seconds() == pytest.approx(max(NEXT_SECONDS, waited))


def test_a_submit_to_a_key_waits_for_the_commit_of_the_one_before() -> None:
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
            assert other.is_alive(), "the second submit did not wait"
        done.append("first")
        session.commit()
    other.join()
    assert done == ["first", "second"]
    assert [payload["n"] for (payload,) in rows("payload", "true ORDER BY key_seq --")] == [0, 1]


def test_submit_many_keeps_the_given_order_across_types_and_chunks() -> None:
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


def test_sql_can_submit_to_a_key_and_refuses_an_empty_one() -> None:
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


def test_a_hundred_thousand_waiting_tasks_of_one_key_do_not_slow_down_other_claims() -> None:
    """The number of rows that a claim reads does not grow with them, with or without a key."""
    many = sql("""
        INSERT INTO ledger.ingest_task (id, type, payload, context, partition_key, key_seq, last_wakeup_at)
        SELECT gen_random_uuid(), 'test.keyed', '{"n": 1}', '{}', 'hot', nextval('ledger.ingest_task_key_seq'),
               (SELECT ledger.ledger_now()) FROM generate_series(1, 100000)""")
    with engine().begin() as connection:
        connection.execute(many)
        connection.execute(sql("ANALYZE ledger.ingest_task"))
    (cold,) = keyed("cold")
    of_hot = "SELECT id FROM ledger.ingest_task WHERE partition_key = 'hot' ORDER BY key_seq"
    head, behind = scalar(f"{of_hot} ASC LIMIT 1"), scalar(f"{of_hot} DESC LIMIT 1")
    with sessions().begin() as session:
        plain = submit(session, "test.keyed", {"n": 7}).task_id
    assert max(rows_read(CLAIM_KEYED, [id_]) for id_ in (cold, head, behind)) < 100
    assert rows_read(CLAIM, [plain]) < 20
    delivered([plain, cold])
    assert statuses([plain, cold]) == ["SUCCEEDED"] * 2


def rows_read(statement: Prepared, ids: list[uuid.UUID]) -> int:
    """Return how many rows of tasks a claim of these ids reads, including those that a filter removes."""
    values: dict[str, Any] = {
        "ids": array(ids),
        "types": "{test.keyed}",
        "batches": "{10}",
        "relaxed": "{t}",
        "limited": "{f}",
        "skipping": "{}",
    }
    values |= {"token": str(uuid.uuid4()), "holder": "me", "lease_seconds": 60}
    with engine().connect() as connection:
        read = plans.rows_read(connection, statement, values)
        connection.rollback()
    return read


def test_only_the_heads_of_keys_are_woken_again_when_wakeups_were_lost(stack: ServersOfTests) -> None:
    a, b = keyed("a", 3), keyed("b", 2)
    move(stack, 3600)
    last = last_wakeup()
    assert repair_lost_wakeups() == 2
    assert woken_since(last) == {a[0], b[0]}
    assert transitions(a[0]) == [(None, "QUEUED")]


def test_all_keys_are_searched_for_lost_wakeups_in_several_ticks(stack: ServersOfTests) -> None:
    heads = [keyed(f"key {n:02}")[0] for n in range(5)]
    move(stack, 3600)
    with pytest.MonkeyPatch.context() as small:
        small.setattr(lost_wakeups, "PAGE", 2)
        woken: set[uuid.UUID] = set()
        for _ in range(3):
            last = last_wakeup()
            repair_lost_wakeups()
            woken |= woken_since(last)
    assert woken == set(heads)


def test_the_task_that_blocks_a_key_is_named_as_the_reason() -> None:
    ids = keyed("a", 4, errors={0: "die"})
    delivered([ids[0]])
    with engine().connect() as connection:
        found = read_details(connection, ids[3])
    assert found.blocker is not None
    assert (found.blocker.task_id, found.blocker.ahead, found.blocker.status) == (ids[0], 3, "DEAD")
    consumed = QueueState(0, frozenset({"w"}))
    (why,) = reasons(found, settings.current(), known_types=handlers(), read_queue=lambda _queue: consumed)
    assert why.code == "not_its_turn"
    assert f"3 tasks are ahead of it in partition key 'a'; the first is {ids[0]}" in why.message
    assert "requeue-dead" in why.message
