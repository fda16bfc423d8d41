"""A consumer that dies or fails anywhere: in the end each entry has one effect, and nothing is left behind.

Every window between reading an entry and acknowledging it, for every kind of sink that takes part in checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from receipts.streams.consumers import StreamConsumer
from receipts.streams.entries import Batch
from tests.receipts.conftest import only
from tests.receipts.consuming import GROUP, StreamUnderTest
from tests.receipts.places import PLACES, STREAM, WINDOWS

COUNT = 6  # three checkpoints of two entries
CASES = [(name, window) for name, make in PLACES.items() for window in (*WINDOWS, *make.windows)]  # type: ignore[attr-defined]
ONCE_WITHOUT_CHECKPOINTS = ("Redis list", "Redis script")
# An exception takes one of two ways, before the decision and after it; a kill does not, so it strikes everywhere.
BOTH_WAYS = ("stream.after_handler", "checkpoint.before_row", "checkpoint.after_row", "checkpoint.before_ack")
RAISING = [(name, window) for name, window in CASES if window in BOTH_WAYS or window not in WINDOWS]
WITHOUT_ROW = [
    (name, window)
    for name, window in CASES
    if name in ("two-phase PostgreSQL", *ONCE_WITHOUT_CHECKPOINTS) and window != "checkpoint.before_mark"
]


@pytest.mark.guarantee
@pytest.mark.parametrize(("place", "window"), CASES, indirect=["place"])
def test_a_consumer_that_is_killed_anywhere_leaves_one_effect_of_each_entry(
    stream: StreamUnderTest, window: str
) -> None:
    stream.add(*range(COUNT))
    stream.killed(f"{window}=kill@2")
    stream.finish()
    assert stream.place.seen() == list(range(COUNT))
    assert stream.is_quiet()


@pytest.mark.guarantee
@pytest.mark.parametrize(("place", "window"), RAISING, indirect=["place"])
def test_an_exception_anywhere_leaves_one_effect_of_each_entry(stream: StreamUnderTest, window: str) -> None:
    stream.add(*range(COUNT))
    stream.raised(f"{window}=raise@2")
    assert stream.consume(), "the shard was not released"
    stream.finish()
    assert stream.place.seen() == list(range(COUNT))
    assert stream.is_quiet()


@pytest.mark.guarantee
@pytest.mark.parametrize(("place", "window"), WITHOUT_ROW, indirect=["place"])
def test_without_checkpoints_a_killed_consumer_loses_no_effect(
    stream: StreamUnderTest, without_checkpoints: None, window: str, request: pytest.FixtureRequest
) -> None:
    stream.add(*range(COUNT))
    stream.killed(f"{window}=kill@2")
    stream.finish()
    seen = stream.place.seen()
    assert set(seen) == set(range(COUNT))
    assert stream.unacknowledged() == []
    assert stream.place.left_behind() == []
    if request.node.callspec.params["place"] in ONCE_WITHOUT_CHECKPOINTS:
        assert seen == list(range(COUNT))


@pytest.mark.guarantee
@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_a_consumer_that_dies_again_and_again_while_it_recovers_leaves_one_effect_of_each_entry(
    stream: StreamUnderTest,
) -> None:
    stream.add(*range(COUNT))
    for window in ("checkpoint.after_row", "checkpoint.before_mark", "checkpoint.before_ack", "stream.after_handler"):
        stream.killed(f"{window}=kill")
        stream.time_passes()
    stream.finish()
    assert stream.place.seen() == list(range(COUNT))
    assert stream.is_quiet()


@pytest.mark.guarantee
@only("two-phase PostgreSQL", "Redis script")
@pytest.mark.parametrize("window", ["checkpoint.before_row", "checkpoint.after_row", "checkpoint.after_sink"])
def test_a_consumer_of_two_sinks_that_is_killed_between_their_commits_leaves_one_effect_in_each(
    stream: StreamUnderTest, configure: Callable[..., None], window: str
) -> None:
    place = stream.place
    configure(place=place.setting, second={"url": place.redis_url, "guarantee": "keyed"})

    def handle(batch: Batch) -> None:
        place.handle(batch)
        for entry in batch.entries:
            batch.sink("second").append(entry, "second", int(entry.fields["n"]))

    stream.consumer = StreamConsumer(GROUP, STREAM, handle, sinks=("place", "second"))
    stream.add(*range(COUNT))
    stream.killed(f"{window}=kill@3" if window == "checkpoint.after_sink" else f"{window}=kill@2")
    stream.finish()
    assert place.seen() == list(range(COUNT))
    assert [int(n) for n in stream.client.lrange("second", 0, -1)] == list(range(COUNT))
    assert stream.is_quiet()
