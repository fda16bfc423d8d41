"""A reply of Redis or of the ledger that a consumer never gets: in the end each entry has one effect."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import settings
from chaos.fault_proxy import COMMIT, EVALSHA, Fault, FaultProxy
from models.errors import Unreachable
from sinks.configuration import open_sinks
from tests.receipts.conftest import only
from tests.receipts.consuming import StreamUnderTest, point_at

COUNT = 6
FAULTS = [Fault.LOSE_REPLY, Fault.RESET]
READ = [rb"WATCH ", rb"XREADGROUP ", rb"EXEC"]  # the history of the consumer first, then new entries


@pytest.fixture
def redis_line(stream: StreamUnderTest) -> Iterator[FaultProxy]:
    """The way of the consumer to Redis."""
    with FaultProxy(settings.current().redis_url) as proxy:
        point_at(stream.servers, REDIS_URL=proxy.url)
        yield proxy


@pytest.fixture
def ledger_line(stream: StreamUnderTest) -> Iterator[FaultProxy]:
    """The way of the consumer to the ledger."""
    database = settings.current().database_url
    with FaultProxy(database) as proxy:
        point_at(stream.servers, DATABASE_URL=proxy.url)
        open_sinks().installation()  # the commit of which is not meant
        yield proxy
        point_at(stream.servers, DATABASE_URL=database)


@pytest.mark.guarantee
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("command", "nth"),
    [(EVALSHA, 1), (EVALSHA, 2), (EVALSHA, 3), *[(command, nth) for command in READ for nth in (1, 2)]],
)
@only("Redis list", "two-phase PostgreSQL")
def test_a_read_whose_reply_is_lost_skips_no_entry_and_keeps_the_order(
    stream: StreamUnderTest, redis_line: FaultProxy, fault: Fault, command: bytes, nth: int
) -> None:
    """Entries of a lost reply are unacknowledged. A client that repeated the read would get the ones behind them."""
    stream.add(*range(COUNT))
    redis_line.arm(fault, command, nth=nth)
    with pytest.raises(Unreachable, match=r"Redis at 127.0.0.1:\d+ is unreachable"):
        stream.consume()
    assert redis_line.strikes
    assert stream.consume()
    assert stream.place.seen() == list(range(COUNT))
    stream.finish()
    assert stream.is_quiet()


@pytest.mark.guarantee
@pytest.mark.parametrize("fault", FAULTS)
@only("Redis list", "Redis script", "two-phase PostgreSQL")
def test_an_acknowledgement_whose_reply_is_lost_is_repeated(
    stream: StreamUnderTest, redis_line: FaultProxy, fault: Fault
) -> None:
    stream.add(*range(COUNT))
    redis_line.arm(fault, rb"XACK ")
    with pytest.raises(Unreachable):
        stream.consume()
    assert redis_line.strikes
    assert stream.consume()
    assert stream.place.seen() == list(range(COUNT))
    stream.finish()
    assert stream.is_quiet()


@pytest.mark.guarantee
@pytest.mark.parametrize("fault", FAULTS)
def test_a_commit_of_the_ledger_whose_reply_is_lost_is_found_out(
    stream: StreamUnderTest, ledger_line: FaultProxy, fault: Fault
) -> None:
    stream.add(*range(COUNT))
    ledger_line.arm(fault, COMMIT, nth=2)
    assert stream.consume()
    assert ledger_line.strikes
    stream.finish()
    assert stream.place.seen() == list(range(COUNT))
    assert stream.is_quiet()
