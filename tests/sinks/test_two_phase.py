"""Two-phase sinks: several sinks and `Finish` commit together or not at all, in the order of partition keys."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from embedded.home import Home
from embedded.postgres import Postgres
from embedded.program import Program
from models.engine import engine
from sinks.configuration import open_sinks
from sinks.contract import SinkNotReady
from sinks.prepared_postgres import PreparedPostgres
from sinks.recovery import prune_keys
from tasks import Finish
from tasks.core.task import NoSinks, Task
from tasks.execution.stopping import WorkerStops
from tests.servers import Cluster, ServersOfTests, wait_until
from tests.sinks.places import INSERT, LedgerPlace, TwoPhasePlace, insert
from tests.tasks.deliveries import delivered, handled, scalar, submitted
from tests.tasks.lost_workers import killed
from tests.tasks.outside import TYPE, ran, state
from tests.tasks.work import rows


@pytest.fixture
def place(other: Engine, configure: Callable[..., None]) -> TwoPhasePlace:
    """Two sinks in one database: `place` and `second`."""
    made = TwoPhasePlace(other)
    configure(place=made.setting, second=made.setting)
    return made


def in_ledger(id_: uuid.UUID) -> int:
    return LedgerPlace().count(id_)


@pytest.mark.guarantee
def test_a_finish_and_the_effect_in_the_sink_commit_together(place: TwoPhasePlace) -> None:
    def write(task: Task) -> Finish:
        place.write(task)
        return Finish(lambda db: insert(db, task.id), "done")

    id_ = ran(write)
    assert state(id_) == ("SUCCEEDED", 0, None)
    assert (place.count(id_), in_ledger(id_)) == (1, 1)


@pytest.mark.guarantee
def test_a_finish_that_fails_leaves_no_effect_in_the_sink(place: TwoPhasePlace) -> None:
    def fail(db: Session) -> None:
        raise KeyError("no")

    def write(task: Task) -> Finish:
        place.write(task)
        return Finish(fail)

    id_ = ran(write, max_attempts=1)
    assert state(id_) == ("DEAD", 1, "handler_error")
    assert place.count(id_) == 0
    assert place.left_behind() == []


@pytest.mark.guarantee
def test_two_sinks_commit_both_or_none(place: TwoPhasePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second transaction cannot be prepared, after the first one has been."""

    def write(task: Task) -> None:
        task.sink("place").run(insert, task.id)
        task.sink("second").run(insert, task.id)
        if task.attempt_count == 0:
            prepare = open_sinks().find("second")
            monkeypatch.setattr(prepare, "pre_commit", cannot_prepare)
        else:
            monkeypatch.undo()

    def cannot_prepare(txn: Any) -> None:
        assert len(place.left_behind()) > 0  # the first one is prepared
        raise OSError("no answer")

    id_ = ran(write)
    assert (state(id_), place.count(id_), place.left_behind()) == (("RETRYING", 1, "handler_error"), 0, [])
    with handled(TYPE, write, transactional=False):
        delivered([id_])
    assert (state(id_), place.count(id_)) == (("SUCCEEDED", 1, None), 2)


def test_a_function_that_goes_on_after_a_database_error_fails_with_a_sentence(place: TwoPhasePlace) -> None:
    def catch_an_error(db: Session) -> None:
        insert(db, uuid.uuid4())
        with pytest.raises(DBAPIError):
            db.execute(text("SELECT 1 / 0"))

    id_ = ran(lambda task: task.sink("place").run(catch_an_error), max_attempts=1)
    assert (state(id_), place.left_behind()) == (("DEAD", 1, "handler_error"), [])
    assert "use a savepoint" in rows("error_message")[0][0]


@pytest.mark.guarantee
@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK", "commit()"])
def test_a_function_that_ends_its_transaction_is_refused_and_its_task_is_dead(place: TwoPhasePlace, end: str) -> None:
    def misuse(db: Session) -> None:
        db.execute(INSERT, {"task_id": uuid.uuid4(), "n": 0})
        db.commit() if end == "commit()" else db.execute(text(end))

    id_ = ran(lambda task: task.sink("place").run(misuse))
    assert state(id_) == ("DEAD", 1, "transaction_misused")
    assert place.left_behind() == []


@pytest.mark.guarantee
def test_effects_of_one_partition_key_become_visible_in_their_order(place: TwoPhasePlace) -> None:
    """The worker of the first task dies after the decision; the second one finishes it before it begins."""
    seen: list[int] = []

    def write(task: Task) -> None:
        place.write(task)
        seen.append(place.count(first))

    with handled(TYPE, write, transactional=False):
        first, second = (submitted(1, TYPE, partition_key="a")[0] for _ in range(2))
        killed([first], "sinks.before_commit=kill")
        assert (state(first)[0], place.count(first)) == ("SUCCEEDED", 0)
        delivered([second])
    assert (state(second)[0], seen) == ("SUCCEEDED", [1])


def test_a_transactional_handler_may_not_use_sinks(place: TwoPhasePlace) -> None:
    def write(task: Task, db: Session) -> None:
        with pytest.raises(NoSinks):
            place.write(task)

    with handled(TYPE, write):
        (id_,) = submitted(1, TYPE)
        delivered([id_])
    assert state(id_) == ("SUCCEEDED", 0, None)


@pytest.mark.guarantee
def test_a_worker_that_stops_in_the_middle_of_a_handler_leaves_no_transaction_open(place: TwoPhasePlace) -> None:
    def write(task: Task) -> None:
        place.write(task)
        raise WorkerStops(0)

    with handled(TYPE, write, transactional=False):
        (id_,) = submitted(1, TYPE)
        with pytest.raises(WorkerStops):
            delivered([id_])
    assert state(id_) == ("QUEUED", 0, None)
    assert place.left_behind() == []


def test_a_transaction_is_recorded_as_finished_and_pruned_with_its_task(place: TwoPhasePlace) -> None:
    ran(place.write)
    assert scalar("SELECT state || ' ' || decision FROM ledger.sink_transaction") == "committed commit"
    with engine().begin() as connection:
        connection.execute(text("DELETE FROM celeriac.ingest_task"))
    prune_keys(engine())
    assert scalar("SELECT count(*) FROM ledger.sink_transaction") == 0


@pytest.fixture
def without_prepared_transactions(tmp_path: Path) -> Iterator[str]:
    """The address of a server with PostgreSQL's default: max_prepared_transactions is 0."""
    home = Home(tmp_path / "home")
    home.create()
    port = home.ports({"postgres": 0}, wished={})["postgres"]
    server = Postgres(home, port, configuration={"fsync": "off", "max_prepared_transactions": "0"})
    child = Program("postgres", server.command, prepare=server.prepare).start(home)
    try:
        wait_until(server.is_ready, "the server is ready")
        yield Cluster.sqlalchemy(server.url(superuser=True, database="postgres"))
    finally:
        child.end(20, stop_signal=signal.SIGINT)


@pytest.mark.guarantee
def test_a_server_that_does_not_allow_prepared_transactions_is_named_with_the_remedy(
    without_prepared_transactions: str, configure: Callable[..., None], ledger: ServersOfTests
) -> None:
    setting: dict[str, Any] = {"url": without_prepared_transactions, "guarantee": "two_phase"}
    configure(place=setting)
    with pytest.raises(SinkNotReady, match="set max_prepared_transactions"):
        PreparedPostgres("place", without_prepared_transactions).check()
    id_ = ran(lambda task: task.sink("place").run(lambda _db: None), max_attempts=1)
    assert state(id_) == ("DEAD", 1, "handler_error")
    assert "set max_prepared_transactions" in rows("error_message")[0][0]
