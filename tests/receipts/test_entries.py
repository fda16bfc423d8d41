"""Entries: their keys, repeats, fields that are not text, and entries that were deleted from the stream."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

import settings
from receipts.streams import repeats
from receipts.streams.entries import Batch, Entry
from sinks.contract import SinkMisused, UnknownSink
from tests.receipts.conftest import only
from tests.receipts.consuming import StreamUnderTest
from tests.receipts.places import STREAM
from tests.receipts.test_checkpoints import events

HEADER = "x-original-message-id"


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"id": "17", HEADER: "m"}, "event:17"),
        ({HEADER: "m", "headers": json.dumps({HEADER: "other"})}, "message:m"),
        ({"headers": json.dumps({HEADER: "m"})}, "message:m"),
        ({"headers": "not JSON"}, "message:1-0"),
        ({"headers": "[]"}, "message:1-0"),
        ({}, "message:1-0"),
    ],
)
def test_the_key_of_an_effect_comes_from_the_event_then_from_the_original_message(
    fields: dict[str, str], key: str
) -> None:
    assert Entry("1-0", fields).effect_key() == key
    assert Entry("1-0", fields).effect_key("business") == "business:business"


def test_a_key_that_json_cannot_express_is_hashed_and_stays_distinct() -> None:
    keys = {
        Entry("1-0", {"id": text}).effect_key() for text in ("\x00", "\udcff", "\udcfe", "\N{REPLACEMENT CHARACTER}")
    }
    assert len(keys) == 4
    assert all(json.loads(json.dumps(key)).encode() for key in keys)


@only("Redis list", "Redis script")
def test_an_entry_with_bytes_that_are_not_text_is_handled_once(stream: StreamUnderTest) -> None:
    stream.client.xadd(STREAM, {"n": 1, "id": b"\xff\x00", "other": b"\xfe"})
    stream.raised("checkpoint.after_row=raise")
    assert stream.consume()
    assert stream.place.seen() == [1]
    stream.finish()
    assert stream.is_quiet()


@only("Redis list", "Redis script")
def test_a_message_that_is_published_again_has_no_second_effect(
    stream: StreamUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sinks recognise it by its key, whether or not the insurance is on."""
    monkeypatch.setenv("SINK_DEDUP_ENABLED", "false")
    settings.current.cache_clear()
    stream.add(1, **{HEADER: "m"})
    assert stream.consume("first")
    stream.add(1, **{HEADER: "m"})
    assert stream.consume("second")
    assert stream.place.seen() == [1]
    assert stream.unacknowledged() == []


@only("atomic")
@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_insurance_drops_repeats_of_a_message_for_a_sink_without_keys(
    stream: StreamUnderTest, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_enabled: bool
) -> None:
    monkeypatch.setenv("SINK_DEDUP_ENABLED", str(is_enabled))
    settings.current.cache_clear()
    caplog.set_level("INFO", "receipts")
    stream.add(1, 1, **{HEADER: "in one batch"})
    stream.add(2, **{HEADER: "m"})
    assert stream.consume("first")
    stream.add(2, **{HEADER: "m"})
    stream.add(3, 3)
    assert stream.consume("second")
    assert stream.place.seen() == ([1, 2, 3, 3] if is_enabled else [1, 1, 2, 2, 3, 3])
    assert events(caplog).count("repeats_dropped") == (2 if is_enabled else 0)
    assert stream.unacknowledged() == []


@pytest.mark.guarantee
@only("atomic", "two-phase PostgreSQL")
@pytest.mark.parametrize("window", ["stream.after_handler", "checkpoint.before_row"])
def test_the_insurance_does_not_drop_an_entry_whose_checkpoint_was_aborted(
    stream: StreamUnderTest, window: str
) -> None:
    stream.add(1, **{HEADER: "m"})
    stream.raised(f"{window}=raise")
    assert stream.consume()
    assert stream.place.seen() == [1]


@only("atomic")
def test_the_insurance_remembers_a_limited_number_of_messages(
    stream: StreamUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeats, "REMEMBERED", 3)
    for n in range(8):
        stream.add(n, **{HEADER: str(n)})
    assert stream.consume()
    assert stream.client.zcard("celeriac:{orders}:consumed:save") == 3


@only("Redis list", "Redis script")
def test_two_values_of_an_entry_with_one_key_are_refused_instead_of_losing_one(stream: StreamUnderTest) -> None:
    def append_twice(batch: Batch) -> None:
        for entry in batch.entries:
            batch.sink("place").append(entry, stream.place.list_name, 1)  # type: ignore[attr-defined]
            batch.sink("place").append(entry, stream.place.list_name, 2)  # type: ignore[attr-defined]

    _refused(stream, append_twice, SinkMisused, "appends two values with one key")


@only("Redis list", "Redis script")
def test_several_values_of_an_entry_have_keys_of_their_own(stream: StreamUnderTest) -> None:
    def append_three(batch: Batch) -> None:
        for entry in batch.entries:
            for n in range(3):
                batch.sink("place").append(entry, stream.place.list_name, n, key=f"{entry.id} {n}")  # type: ignore[attr-defined]

    three = StreamUnderTest(stream.servers, stream.place, handler=append_three)
    stream.add(0, 0)
    assert three.consume()
    assert stream.place.seen() == [0, 1, 2, 0, 1, 2]


@only("Redis script")
def test_a_list_that_the_script_cannot_reach_is_refused_before_anything_is_decided(stream: StreamUnderTest) -> None:
    def append_elsewhere(batch: Batch) -> None:
        batch.sink("place").append(batch.entries[0], "elsewhere", 1)

    _refused(stream, append_elsewhere, SinkMisused, "must share one hash tag")


@only("Redis list")
def test_a_list_that_belongs_to_celeriac_is_refused_before_anything_is_decided(stream: StreamUnderTest) -> None:
    def append_elsewhere(batch: Batch) -> None:
        batch.sink("place").append(batch.entries[0], "celeriac:{orders}:holder:save", 1)

    _refused(stream, append_elsewhere, SinkMisused, "belong to Celeriac")


@only("atomic")
def test_a_sink_that_the_consumer_does_not_have_is_refused(stream: StreamUnderTest) -> None:
    _refused(stream, lambda batch: batch.sink("other"), UnknownSink, "has no sink 'other'. Known: place")


@only("Redis list")
def test_entries_that_were_deleted_unacknowledged_are_reported_and_do_not_stop_the_shard(
    stream: StreamUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    ids = stream.add(0, 1, 2)
    stream.raised("stream.after_read=raise")
    stream.client.xdel(STREAM, ids[0])
    assert stream.consume()
    assert stream.place.seen() == [1, 2]
    assert stream.unacknowledged() == []
    (deleted,) = [record for record in caplog.records if getattr(record, "event", "") == "entries_trimmed"]
    assert (deleted.levelname, vars(deleted)["entries"]) == ("ERROR", 1)


def _refused(stream: StreamUnderTest, handler: Callable[[Batch], object], error: type[Exception], message: str) -> None:
    """Assert that the handler fails, and that its entry waits."""
    failing = StreamUnderTest(stream.servers, stream.place, handler=handler)
    stream.add(0)
    with pytest.raises(error, match=message):
        failing.consume()
    assert stream.place.seen() == []
    assert len(stream.unacknowledged()) == 1
