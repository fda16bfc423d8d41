"""Every attempt to publish is counted by its result, with the time of the send alone and the delay of the event."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY
from sqlalchemy import event

from models.engine import engine
from outbox import relay as relay_module
from outbox.lease import ClaimedEvent
from outbox.publishers.contract import DestinationDown, Failed, NotTried, Refused, Result, Sent
from outbox.relay import Relay
from tally.counts import counts
from tally.fold import fold
from tally.subjects import Subject
from tally.totals import Total, read_totals
from tests.outbox.ledger import insert, move
from tests.outbox.scripted import Clock, scripted
from tests.servers import ServersOfTests

SEND_SECONDS = 2.0
STATEMENT_SECONDS = 10.0


@pytest.fixture
def clock(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The relay's own clock. Every statement takes ten seconds."""
    clock = Clock()

    def pass_time(*_: object) -> None:
        clock.now += STATEMENT_SECONDS

    event.listen(relay.engine, "before_cursor_execute", pass_time)
    monkeypatch.setattr(relay_module, "time", SimpleNamespace(monotonic=clock))
    return clock


def published() -> dict[tuple[str, str], Total]:
    """Return what the tally knows of publishes, by destination and result."""
    counts.append()
    fold(engine(), budget_seconds=60)
    with engine().connect() as connection:
        totals = read_totals(connection)
    return {(each.queue, each.result): each for each in totals if each.subject is Subject.PUBLISH}


def test_each_result_has_the_time_of_the_send_alone_and_events_their_delay(
    relay: Relay, clock: Clock, stack: ServersOfTests
) -> None:
    results: list[Result] = [Sent(), Sent(), Failed("no"), Refused("never")]

    def answer(_event: ClaimedEvent) -> Result:
        clock.now += SEND_SECONDS
        return results.pop(0)

    scripted(relay, "shop", answer)
    insert("shop", 4)
    move(stack, 100)
    relay.tick(budget_seconds=1e6)
    found = published()
    assert {key: total.count for key, total in found.items()} == {
        ("shop", "success"): 2,
        ("shop", "failure"): 1,
        ("shop", "dead"): 1,
    }
    assert {total.run_seconds for total in found.values()} == {4 * SEND_SECONDS}, "one batch, without its statements"
    assert all(sum(total.run) == 1 for total in found.values())
    delivered = found["shop", "success"]
    assert sum(delivered.wait) == 2
    assert 200 <= delivered.wait_seconds < 300


def test_a_program_counts_each_publish_once_however_its_events_end(relay: Relay, clock: Clock) -> None:
    def answer(_event: ClaimedEvent) -> Result:
        clock.now += SEND_SECONDS
        return results.pop(0)

    def of_program(name: str) -> float:
        labels = {"destination": "once"}
        return REGISTRY.get_sample_value(f"celeriac_process_publish_seconds_{name}", labels) or 0.0

    scripted(relay, "once", answer)
    results: list[Result] = [Sent(), Failed("no"), Refused("never")]
    insert("once", 3)
    relay.tick(budget_seconds=1e6)
    assert (of_program("count"), of_program("sum")) == (1, 3 * SEND_SECONDS)
    results = [NotTried()]
    insert("once")
    relay.tick(budget_seconds=0)
    assert of_program("count") == 1, "nothing was published"


def test_a_publish_to_an_unreachable_destination_is_a_failure_with_its_time(relay: Relay, clock: Clock) -> None:
    def refuse(_event: ClaimedEvent) -> Result:
        clock.now += SEND_SECONDS
        raise DestinationDown("connection refused")

    scripted(relay, "shop", refuse)
    insert("shop", 3)
    relay.tick(budget_seconds=1e6)
    (failure,) = published().values()
    assert (failure.queue, failure.result, failure.count) == ("shop", "failure", 1)
    assert (failure.run_seconds, sum(failure.wait)) == (SEND_SECONDS, 0)


def test_an_event_without_a_destination_is_dead_and_was_never_sent(relay: Relay) -> None:
    insert("nowhere")
    relay.tick()
    (dead,) = published().values()
    assert (dead.queue, dead.result, dead.count) == ("nowhere", "dead", 1)
    assert (dead.run_seconds, sum(dead.run)) == (0, 0)
