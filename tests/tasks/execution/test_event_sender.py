"""The worker's main process sends what its children report, also after an outage of the broker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tasks.core.outcomes import DONE
from tasks.execution.event_sender import SHOWN_PER_SECOND, WAITING_EVENTS, EventSender
from tasks.execution.task_events import EventChannel, report_settled, report_started
from tests.servers import ServersOfTests, wait_until
from tests.tasks.celery_settings import application
from tests.tasks.execution.event_channels import channel_in_use
from tests.tasks.execution.event_listener import Listener, dead, new_task
from tests.tasks.ledger_line import Line


@pytest.fixture
def channel() -> Iterator[EventChannel]:
    with channel_in_use() as channel:
        yield channel


@pytest.fixture
def line(stack: ServersOfTests) -> Iterator[Line]:
    with closing(Line(stack.addresses["BROKER_URL"])) as line:
        yield line


@pytest.fixture
def listener(stack: ServersOfTests) -> Iterator[Listener]:
    with application(stack.addresses["BROKER_URL"]) as app, Listener(app) as listener:
        yield listener


@pytest.fixture
def wanted() -> list[bool | None]:
    return [True]


@pytest.fixture
def sender(channel: EventChannel, line: Line, wanted: list[bool | None]) -> Iterator[EventSender]:
    with application(line.url) as app:
        app.conf.update(broker_write_url=line.url)  # settings take this address for an old one of the running stack
        sender = EventSender(app, channel, hostname="w@here", is_wanted=lambda: wanted[0])
        sender.start()
        yield sender
        line.is_down = False
        if sender._threads[0].is_alive():
            sender.stop()
    assert not any(thread.is_alive() for thread in sender._threads)


def test_a_listener_sees_the_life_of_a_task(sender: EventSender, listener: Listener, channel: EventChannel) -> None:
    good, bad = new_task(), new_task()
    wait_until(lambda: channel._shared[1] >= 2, "tasks are granted")
    followed = report_started([good, bad])
    assert listener.await_state(good, "STARTED").worker.hostname == "w@here"
    report_settled({good: DONE, bad: dead()}, followed, {good: 1.5, bad: 0.25})
    seen = listener.await_state(good, "SUCCESS")
    assert (seen.name, seen.runtime, seen.retries) == ("mail.send", 1.5, 2)
    seen = listener.await_state(bad, "FAILURE")
    assert (seen.exception, seen.runtime, seen.args, seen.traceback) == ("SMTPError: no such user", 0.25, None, None)


def test_children_report_only_while_the_worker_was_told_to(
    sender: EventSender, channel: EventChannel, wanted: list[bool | None]
) -> None:
    wanted[0] = False
    wait_until(lambda: not channel.is_on, "events are off")
    wanted[0] = True
    wait_until(lambda: channel.is_on, "events are on")
    wanted[0] = None  # the worker is reconnecting
    wait_until(lambda: channel._shared[1] == SHOWN_PER_SECOND, "the sender has looked again")
    assert channel.is_on


def test_failures_wait_for_an_unreachable_broker_and_nothing_else_is_granted(
    sender: EventSender, listener: Listener, line: Line, channel: EventChannel, caplog: pytest.LogCaptureFixture
) -> None:
    before, during = new_task(), new_task()
    report_settled({before: dead()}, ())
    listener.await_state(before, "FAILURE")
    line.go_down()
    report_settled({during: dead()}, ())
    wait_until(lambda: "Events for Flower are delayed" in caplog.text, "the outage is noticed")
    channel.take_grant(SHOWN_PER_SECOND)
    assert report_started([new_task()]) == frozenset()
    line.is_down = False
    listener.await_state(during, "FAILURE")
    wait_until(lambda: channel._shared[1] > 0, "tasks are granted again")
    assert caplog.text.count("Events for Flower are delayed") == 1


def test_the_number_of_waiting_events_is_limited_and_the_latest_are_kept(
    sender: EventSender, listener: Listener, line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    line.go_down()
    report_settled({new_task(): dead()}, ())
    wait_until(lambda: "Events for Flower are delayed" in caplog.text, "the outage is noticed")
    sender._waiting.extend([{"type": "task-failed", "uuid": "old"}] * WAITING_EVENTS)
    last = new_task()
    report_settled({last: dead()}, [last])
    wait_until(lambda: sender._waiting[-1]["uuid"] == str(last.id), "the last one is read")
    assert len(sender._waiting) == WAITING_EVENTS
    sender._waiting = type(sender._waiting)(list(sender._waiting)[-2:], WAITING_EVENTS)
    line.is_down = False
    listener.await_state(last, "FAILURE")


def test_what_was_settled_last_is_sent_before_the_worker_ends(sender: EventSender, listener: Listener) -> None:
    last = new_task()
    report_settled({last: dead()}, ())
    sender.stop()
    listener.await_state(last, "FAILURE")
