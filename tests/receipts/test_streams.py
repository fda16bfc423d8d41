"""Consumers of streams without faults: effects, order, state, and acknowledgement."""

from __future__ import annotations

from tests.receipts.consuming import StreamUnderTest, checkpoints


def test_the_effect_of_each_entry_happens_once_and_in_order(stream: StreamUnderTest) -> None:
    stream.add(*range(7))
    before = checkpoints("committed")
    assert stream.consume()
    assert stream.place.seen() == list(range(7))
    assert stream.is_quiet()
    assert checkpoints("committed") == before + 4  # of two entries each


def test_without_checkpoints_each_batch_is_acknowledged_after_its_effects(
    stream: StreamUnderTest, without_checkpoints: None
) -> None:
    stream.add(*range(5))
    assert stream.consume()
    assert stream.place.seen() == list(range(5))
    assert stream.unacknowledged() == []
    assert stream.place.left_behind() == []
