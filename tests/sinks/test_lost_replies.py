"""A reply that a sink or the ledger has sent and a worker never got: the statement was executed, or it was not.

The worker cannot know which of the two. In the end there is one effect, no prepared transaction and no lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from chaos.fault_proxy import (
    BEGIN,
    COMMIT,
    COMMIT_PREPARED,
    EVALSHA,
    PREPARE_TRANSACTION,
    ROLLBACK_PREPARED,
    Fault,
    FaultProxy,
)
from models.engine import engine, make_engine
from sinks.recovery import recover
from tasks.core.task import Task
from tasks.execution.deliver import deliver
from tests.servers import ServersOfTests, wait_until
from tests.sinks.places import PLACES, Place
from tests.sinks.test_conformance import raised, recovered, writing
from tests.tasks.deliveries import delivered, handled, submitted
from tests.tasks.lost_workers import killed, later, reclaim_lost
from tests.tasks.outside import TYPE, ran, state

STATEMENTS = {
    "keyed PostgreSQL": [COMMIT],
    "two-phase PostgreSQL": [BEGIN, PREPARE_TRANSACTION, COMMIT_PREPARED],
    "Redis list": [EVALSHA],
}
CASES = [
    pytest.param(name, statement, id=f"{name}: {statement.decode().partition(chr(92))[0].strip()}")
    for name in PLACES
    for statement in STATEMENTS.get(name, [])
]
# where the worker dies, and what the recovery then orders
ORDERS = {"sinks.before_commit": COMMIT_PREPARED, "sinks.before_decision": ROLLBACK_PREPARED}
FAULTS = [Fault.LOSE_REPLY, Fault.RESET]


@pytest.fixture
def line(place: Place, configure: Callable[..., None]) -> Iterator[FaultProxy]:
    """The way to the sink."""
    with FaultProxy(place.url) as proxy:
        configure(**{place.name: {**place.setting, "url": proxy.url}})
        yield proxy


@pytest.fixture
def ledger_line(ledger: ServersOfTests) -> Iterator[FaultProxy]:
    """A way to the ledger."""
    with FaultProxy(engine().url.render_as_string(hide_password=False)) as proxy:
        yield proxy


def is_clean(place: Place) -> bool:
    """Return True if nothing is left. A server may need a moment to notice that a connection was reset."""
    return place.left_behind() == []


@pytest.mark.guarantee
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("place", "statement"), CASES, indirect=["place"])
def test_a_statement_whose_reply_is_lost_or_that_never_arrives_leaves_one_effect(
    place: Place, statement: bytes, fault: Fault, line: FaultProxy, ledger: ServersOfTests
) -> None:
    ran(writing(place))  # so that connections are open and scripts are loaded
    with handled(TYPE, writing(place), transactional=False, backoff=[0]):
        (id_,) = submitted(1, TYPE)
        line.arm(fault, statement)
        delivered([id_])
        (strike,) = line.strikes
        assert not strike.reply.startswith((b"E", b"-")), "the server has refused the statement"
        recovered(ledger)
        delivered([id_])
        recovered(ledger)
    assert state(id_)[0] == "SUCCEEDED"
    assert place.count(id_) == 1
    wait_until(lambda: is_clean(place), "no prepared transaction and no lock", seconds=10)


@pytest.mark.guarantee
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("place", ["two-phase PostgreSQL"], indirect=True)
def test_a_rollback_whose_reply_is_lost_leaves_no_second_effect(
    place: Place, fault: Fault, line: FaultProxy, ledger: ServersOfTests
) -> None:
    """The worker fails after it has prepared, and orders the sink to roll back."""
    with handled(TYPE, writing(place), transactional=False, backoff=[0]):
        (id_,) = submitted(1, TYPE)
        line.arm(fault, ROLLBACK_PREPARED)
        raised([id_], "sinks.before_decision")
        assert [strike.statement[:17] for strike in line.strikes] == [ROLLBACK_PREPARED]
        delivered([id_])
        recovered(ledger)
    assert state(id_)[0] == "SUCCEEDED"
    assert place.count(id_) == 1
    wait_until(lambda: is_clean(place), "no prepared transaction and no lock", seconds=10)


@pytest.mark.guarantee
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("place", ["two-phase PostgreSQL"], indirect=True)
@pytest.mark.parametrize("window", ORDERS)
def test_an_order_of_the_recovery_whose_reply_is_lost_is_given_again_by_the_next_recovery(
    place: Place, window: str, fault: Fault, line: FaultProxy, ledger: ServersOfTests
) -> None:
    with handled(TYPE, writing(place), transactional=False, backoff=[0]):
        (id_,) = submitted(1, TYPE)
        killed([id_], f"{window}=kill")
        reclaim_lost(ledger)
        line.arm(fault, ORDERS[window])
        (gid,) = recover(engine()).left
        assert len(line.strikes) == 1
        found = recover(engine())
        assert (found.committed or found.aborted) == [gid]
        later(ledger, 3600)
        delivered([id_])
    assert state(id_)[0] == "SUCCEEDED"
    assert place.count(id_) == 1
    wait_until(lambda: is_clean(place), "no prepared transaction and no lock", seconds=10)


@pytest.mark.guarantee
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_a_settling_commit_whose_reply_is_lost_leaves_one_effect(
    place: Place, fault: Fault, ledger_line: FaultProxy, ledger: ServersOfTests
) -> None:
    """At that moment the transaction of a two-phase sink is prepared, and only the ledger knows the decision."""
    through_proxy = make_engine(ledger_line.url)

    def write(task: Task) -> None:
        place.write(task)
        if not ledger_line.strikes:
            ledger_line.arm(fault, COMMIT)

    with handled(TYPE, write, transactional=False, backoff=[0]):
        (id_,) = submitted(1, TYPE)
        deliver(through_proxy, [id_])
        through_proxy.dispose()
        assert [strike.statement for strike in ledger_line.strikes] == [b"COMMIT"]
        assert state(id_) == ("SUCCEEDED", 0, None), "a lost reply costs no attempt"
        assert place.count(id_) == 1
        recovered(ledger)
    assert place.count(id_) == 1
    wait_until(lambda: is_clean(place), "no prepared transaction and no lock", seconds=10)


@pytest.mark.guarantee
@pytest.mark.parametrize("place", ["two-phase PostgreSQL"], indirect=True)
def test_an_effect_does_not_overtake_that_of_an_earlier_task_of_its_partition_key(
    place: Place, line: FaultProxy, ledger: ServersOfTests
) -> None:
    """The first worker died after the decision, and the second one cannot reach the sink when it makes up for that."""
    with handled(TYPE, writing(place), transactional=False, backoff=[0]):
        first, second = submitted(2, TYPE, partition_key="one")
        killed([first], "sinks.before_commit=kill")
        line.arm(Fault.RESET, COMMIT_PREPARED)
        delivered([second])
        assert len(line.strikes) == 1
        assert (place.count(first), place.count(second)) == (0, 0)
        assert state(second)[:2] == ("RETRYING", 0), "waiting for the sink must not count as an attempt"
        later(ledger, 60)
        delivered([second])
    assert (place.count(first), place.count(second)) == (1, 1)
    wait_until(lambda: is_clean(place), "no prepared transaction and no lock", seconds=10)
