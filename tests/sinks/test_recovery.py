"""Recovery of two-phase sinks: the ledger's decision is obeyed once, by all recoverers, however late, and by no other.

Workers and recoverers are processes that are suspended or killed at a failpoint.
"""

from __future__ import annotations

import os
import signal
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import Engine, create_engine, text

import settings
from bench.scratch import postgres_stopped
from embedded.temporary_servers import environment, temporary_servers
from models.engine import engine
from sinks.configuration import open_sinks
from sinks.recovery import Recovered, recover
from sinks.two_phase import gid_of
from tasks.execution.deliver import deliver
from tasks.operations import installation_metrics
from tests.servers import ServersOfTests
from tests.sinks.places import CREATE, TwoPhasePlace
from tests.sinks.test_conformance import recovered, writing
from tests.tasks.deliveries import delivered, handled, scalar, submitted
from tests.tasks.lost_workers import killed, later, reclaim_lost, start_child
from tests.tasks.outside import TYPE, state

WEEK = 7 * 86_400
DECIDED = "sinks.before_commit"  # a worker that dies here has decided `commit`, and its sink is still prepared
UNDECIDED = "sinks.before_decision"  # and here it has prepared only

pytestmark = pytest.mark.guarantee


@pytest.fixture
def place(other: Engine, configure: Callable[..., None], ledger: ServersOfTests) -> Iterator[TwoPhasePlace]:
    """A two-phase sink, and a handler that writes to it."""
    made = TwoPhasePlace(other)
    configure(place=made.setting)
    with handled(TYPE, writing(made), transactional=False, backoff=[0]):
        yield made


def task_that_died(window: str) -> uuid.UUID:
    (id_,) = submitted(1, TYPE)
    killed([id_], f"{window}=kill")
    return id_


def started(work: Callable[[], object], failpoints: str) -> int:
    """Start a process. If the work fails, it exits with 1."""

    def call() -> None:
        try:
            work()
        except Exception:
            traceback.print_exc()
            os._exit(1)

    return start_child(call, failpoints=failpoints)


@dataclass(slots=True)
class Suspended:
    """A process that has suspended itself."""

    pid: int
    has_ended: bool = False

    def go_on(self) -> int:
        """Continue it and return how it ended."""
        os.kill(self.pid, signal.SIGCONT)
        self.has_ended = True
        return os.waitpid(self.pid, 0)[1]


@contextmanager
def suspended(work: Callable[[], object], failpoints: str) -> Iterator[Suspended]:
    """Start a process and wait until it suspends itself."""
    process = Suspended(started(work, failpoints))
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), f"it did not pass {failpoints}"
    try:
        yield process
    finally:
        if not process.has_ended:
            process.go_on()


def prepared(place: TwoPhasePlace) -> list[str]:
    with place.other.begin() as connection:
        return list(connection.scalars(text("SELECT gid FROM pg_prepared_xacts WHERE database = 'sink' ORDER BY gid")))


def stored(id_: uuid.UUID) -> list[tuple[str, str | None]]:
    """Return the state and the decision of each transaction of a task."""
    found = (
        "SELECT array_agg(ARRAY[state, decision] ORDER BY created_at) FROM ledger.sink_transaction WHERE task_id=:id"
    )
    return [tuple(row) for row in scalar(found, id=id_) or []]


def prepare_by_hand(place: TwoPhasePlace, gid: str) -> None:
    with place.other.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("BEGIN"))
        connection.execute(text(f"INSERT INTO public.effect VALUES ('{uuid.uuid4()}', 0)"))
        connection.execute(text(f"PREPARE TRANSACTION '{gid}'"))


def test_two_recoverers_that_have_read_the_same_rows_both_obey_and_the_effect_happens_once(
    place: TwoPhasePlace, ledger: ServersOfTests
) -> None:
    decided, undecided = task_that_died(DECIDED), task_that_died(UNDECIDED)
    reclaim_lost(ledger)
    with suspended(lambda: recover(engine()), "recovery.after_rows=pause") as first:
        found = recover(engine())
        assert (len(found.committed), len(found.aborted), found.failed) == (1, 1, [])
        assert place.left_behind() == []
        assert os.WEXITSTATUS(first.go_on()) == 0
    assert (stored(decided), stored(undecided)) == ([("committed", "commit")], [("aborted", "abort")])
    later(ledger, 3600)
    delivered([undecided])
    assert [place.count(id_) for id_ in (decided, undecided)] == [1, 1]
    assert place.left_behind() == []


def test_unfinished_transactions_and_what_recovery_made_of_them_are_in_the_metrics(
    place: TwoPhasePlace, ledger: ServersOfTests
) -> None:
    def scraped() -> tuple[float, float]:
        shown = installation_metrics.exposition().decode()
        families = {family.name: family.samples for family in text_string_to_metric_families(shown)}
        names = ("celeriac_prepared_transactions", "celeriac_prepared_transaction_oldest_seconds")
        (number,), (age,) = (families[name] for name in names)
        return number.value, age.value

    def counted(outcome: str) -> float:
        labels = {"sink": place.name, "outcome": outcome}
        return REGISTRY.get_sample_value("celeriac_sink_recovery_total", labels) or 0.0

    outcomes = ("done", "already_done", "unknown_to_ledger")
    before = [counted(outcome) for outcome in outcomes]
    assert scraped() == (0, 0)
    task_that_died(DECIDED)
    later(ledger, 90)
    task_that_died("sinks.after_commit")
    prepare_by_hand(place, gid_of(open_sinks().installation(), uuid.uuid4(), uuid.uuid4(), place.name))
    number, age = scraped()
    assert (number, 90 <= age < 120) == (2, True)
    assert len(recover(engine()).committed) == 2
    assert [counted(outcome) - earlier for outcome, earlier in zip(outcomes, before, strict=True)] == [1, 1, 1]
    assert scraped() == (0, 0)


def test_a_recoverer_that_dies_after_it_has_obeyed_leaves_the_rest_to_the_next(
    place: TwoPhasePlace, ledger: ServersOfTests
) -> None:
    decided, undecided = task_that_died(DECIDED), task_that_died(UNDECIDED)
    reclaim_lost(ledger)
    for _ in range(2):  # the second one finds that the sink has obeyed the first
        _, status = os.waitpid(started(lambda: recover(engine()), "recovery.after_obeyed=kill"), 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
    assert (stored(decided), stored(undecided)) == ([("prepared", "commit")], [("open", "abort")])
    found = recover(engine())
    assert (len(found.committed), len(found.aborted)) == (1, 1)
    assert place.count(decided) == 1
    assert place.left_behind() == []


def test_a_recoverer_that_comes_a_week_later_still_obeys(place: TwoPhasePlace, ledger: ServersOfTests) -> None:
    decided, undecided = task_that_died(DECIDED), task_that_died(UNDECIDED)
    later(ledger, WEEK)
    assert len(prepared(place)) == 2
    found = recover(engine())
    assert (len(found.committed), len(found.left)) == (1, 1), "nothing is aborted before its task was reclaimed"
    reclaim_lost(ledger)
    assert len(recover(engine()).aborted) == 1
    assert place.left_behind() == []
    later(ledger, 3600)
    delivered([decided, undecided])
    assert [state(id_)[0] for id_ in (decided, undecided)] == ["SUCCEEDED"] * 2
    assert [place.count(id_) for id_ in (decided, undecided)] == [1, 1]


def test_a_transaction_that_is_prepared_long_after_it_was_aborted_is_rolled_back(
    place: TwoPhasePlace, ledger: ServersOfTests
) -> None:
    """The worker is suspended before PREPARE. Its task succeeds elsewhere; then it goes on, prepares, and dies."""
    (id_,) = submitted(1, TYPE)
    with suspended(lambda: deliver(engine(), [id_]), "sinks.after_handles=pause;two_phase.prepared=kill") as worker:
        recovered(ledger)
        assert stored(id_) == [("aborted", "abort")]
        delivered([id_])
        recovered(ledger)
        assert (state(id_)[0], place.count(id_)) == ("SUCCEEDED", 1)
        later(ledger, WEEK)
        assert os.WTERMSIG(worker.go_on()) == signal.SIGKILL
    (late,) = prepared(place)
    assert recover(engine()).aborted == [late]
    assert (place.count(id_), place.left_behind()) == (1, [])


def test_a_worker_that_prepares_late_and_lives_rolls_back_by_itself(
    place: TwoPhasePlace, ledger: ServersOfTests
) -> None:
    (id_,) = submitted(1, TYPE)
    with suspended(lambda: deliver(engine(), [id_]), "sinks.after_handles=pause") as worker:
        recovered(ledger)
        delivered([id_])
        assert os.WEXITSTATUS(worker.go_on()) == 0
    assert (place.count(id_), place.left_behind()) == (1, [])


def test_an_undecided_transaction_whose_worker_still_runs_is_left_alone(
    place: TwoPhasePlace, ledger: ServersOfTests
) -> None:
    (id_,) = submitted(1, TYPE)
    with suspended(lambda: deliver(engine(), [id_]), "sinks.after_prepare=pause") as worker:
        (gid,) = prepared(place)
        found = recover(engine())
        assert (found.left, found.aborted, found.unknown) == ([gid], [], [])
        assert prepared(place) == [gid]
        assert os.WEXITSTATUS(worker.go_on()) == 0
    assert state(id_) == ("SUCCEEDED", 0, None)
    assert (place.count(id_), place.left_behind()) == (1, [])


def test_a_recoverer_with_an_old_list_does_not_abort_what_was_decided_meanwhile(
    place: TwoPhasePlace, ledger: ServersOfTests
) -> None:
    """It has read that the transaction is undecided. The worker decides and dies; the recoverer goes on."""
    (id_,) = submitted(1, TYPE)
    with (
        suspended(lambda: deliver(engine(), [id_]), f"sinks.after_prepare=pause;{DECIDED}=kill") as worker,
        suspended(lambda: recover(engine()), "recovery.after_rows=pause") as recoverer,
    ):
        assert os.WTERMSIG(worker.go_on()) == signal.SIGKILL
        assert os.WEXITSTATUS(recoverer.go_on()) == 0
    assert (stored(id_), len(prepared(place))) == ([("prepared", "commit")], 1)
    assert len(recover(engine()).committed) == 1
    assert (place.count(id_), place.left_behind()) == (1, [])


def test_a_decided_transaction_that_is_gone_counts_as_committed(place: TwoPhasePlace) -> None:
    id_ = task_that_died("sinks.after_commit")
    assert (stored(id_), prepared(place)) == ([("prepared", "commit")], [])
    assert len(recover(engine()).committed) == 1
    assert (stored(id_), place.count(id_)) == ([("committed", "commit")], 1)
    assert recover(engine()) == Recovered(), "there is nothing left to do"


def test_a_prepared_transaction_that_the_ledger_does_not_know_is_reported_and_never_touched(
    place: TwoPhasePlace, caplog: pytest.LogCaptureFixture
) -> None:
    gid = gid_of(open_sinks().installation(), uuid.uuid4(), uuid.uuid4(), place.name)
    prepare_by_hand(place, gid)
    for _ in range(2):
        assert recover(engine()).unknown == [gid]
    assert f"has the prepared transaction {gid}, which the ledger does not know" in caplog.text
    assert prepared(place) == [gid]


def test_a_transaction_of_another_installation_is_never_touched(
    place: TwoPhasePlace, caplog: pytest.LogCaptureFixture
) -> None:
    gids = [
        gid_of(uuid.uuid4(), uuid.uuid4(), uuid.uuid4(), place.name),
        gid_of(open_sinks().installation(), uuid.uuid4(), uuid.uuid4(), "another-sink-of-ours"),
        "made by another program",
    ]
    for gid in gids:
        prepare_by_hand(place, gid)
    assert recover(engine()) == Recovered()
    assert caplog.text == ""
    assert prepared(place) == sorted(gids)


@pytest.fixture(scope="module")
def other_server() -> Iterator[tuple[settings.Settings, Engine]]:
    """A PostgreSQL of its own, which a test may restart."""
    with temporary_servers(configuration={"fsync": "off"}) as servers:
        with environment(servers.variables):
            current = settings.current()
        made = create_engine(current.database_url)
        with made.begin() as connection:
            connection.execute(text(CREATE))
        yield current, made
        made.dispose()


def test_a_restart_of_the_sinks_server_between_prepare_and_commit_changes_nothing(
    other_server: tuple[settings.Settings, Engine], configure: Callable[..., None], ledger: ServersOfTests
) -> None:
    """One worker lives on, one died after the decision, one before it. All transactions survive the restart."""
    current, server = other_server
    place = TwoPhasePlace(server)
    configure(place=place.setting)
    with handled(TYPE, writing(place), transactional=False, backoff=[0]):
        decided, undecided = task_that_died(DECIDED), task_that_died(UNDECIDED)
        (living,) = submitted(1, TYPE)
        with suspended(lambda: deliver(engine(), [living]), f"{DECIDED}=pause") as worker:
            server.dispose()
            with postgres_stopped(current):
                assert len(recover(engine()).left) == 3, "the sink is unreachable"
            assert os.WEXITSTATUS(worker.go_on()) == 0
        assert place.count(living) == 1, "the worker has committed by itself"
        recovered(ledger)
        delivered([undecided])
    assert [state(id_)[0] for id_ in (decided, undecided, living)] == ["SUCCEEDED"] * 3
    assert [place.count(id_) for id_ in (decided, undecided, living)] == [1, 1, 1]
    with server.begin() as connection:
        assert connection.scalars(text("SELECT gid FROM pg_prepared_xacts")).all() == []
