"""The webhook publisher: what it sends, how it reads answers, how long it waits, and what it hides."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any

import pytest

from outbox.publishers.contract import DestinationDown, Failed, NotTried, Refused, Result, Sent
from outbox.publishers.signed_post import AT_ONCE, Patience, retry_after_seconds
from outbox.publishers.webhook import HttpPublisher
from tests.outbox.publishers.case import events
from tests.outbox.publishers.http_cases import IMPATIENT, PATIENT, Exchange, Hooks, resolving

NOON = datetime(2026, 11, 16, 12, tzinfo=UTC).timestamp()
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def answering(status: int, body: bytes = b"", **headers: str) -> Callable[[Exchange], None]:
    return lambda exchange: exchange.answer(status, body, **headers)


def send_one(hooks: Hooks, behaviour: Callable[[Exchange], None], **options: Any) -> Result:
    with hooks.receiver.behaving(behaviour):
        (result,) = hooks.publisher(**options).publish(events("one"))
    return result


def hmac_sha256(key: bytes, message: bytes) -> str:
    """Compute an HMAC as RFC 2104 defines it, without the standard library's module."""
    block = key.ljust(64, b"\0")
    inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in block) + message).digest()
    return hashlib.sha256(bytes(byte ^ 0x5C for byte in block) + inner).hexdigest()


def test_a_request_has_the_payload_an_idempotency_key_and_a_signature_that_receivers_can_check(hooks: Hooks) -> None:
    event = replace(events("one")[0], id=77, payload={"grüße": ["x", 1.5, None]})
    hooks.publisher(secret="a key").publish([event])
    (request,) = hooks.receiver.requests
    assert request.body == '{"grüße":["x",1.5,null]}'.encode()
    assert request.headers["Content-Type"] == "application/json"
    assert request.headers["Host"] == f"127.0.0.1:{hooks.receiver.port}"
    assert request.headers["Idempotency-Key"] == request.headers["Celeriac-Event-Id"] == "77"
    timestamp = request.headers["Celeriac-Timestamp"]
    assert abs(int(timestamp) - datetime.now(UTC).timestamp()) < 60
    signature = hmac_sha256(b"a key", f"77.{timestamp}.".encode() + request.body)
    assert request.headers["Celeriac-Signature"] == f"v1={signature}"


def test_without_a_secret_a_request_has_no_signature(hooks: Hooks) -> None:
    hooks.publisher().publish(events("one"))
    assert "Celeriac-Signature" not in hooks.receiver.requests[0].headers


def test_the_query_of_an_address_is_kept_and_its_credentials_become_a_header(hooks: Hooks) -> None:
    url = f"http://al%40x:op%3Aen@127.0.0.1:{hooks.receiver.port}/a%20b?t=1&u=%20"
    hooks.publisher(url).publish(events("one"))
    (request,) = hooks.receiver.requests
    assert request.target == "/a%20b?t=1&u=%20"
    assert request.headers["Authorization"] == "Basic YWxAeDpvcDplbg=="


@pytest.mark.parametrize(
    "traceparent",
    [
        f"{TRACE}\r\nX-Evil: 1",
        f"{TRACE}\n",
        "ff" + TRACE[2:],
        TRACE.upper(),
        TRACE.replace("4bf92f", "4bf92"),
        7,
        [TRACE],
    ],
)
def test_an_event_cannot_add_a_header(hooks: Hooks, traceparent: Any) -> None:
    event = replace(events("one")[0], headers={"traceparent": traceparent, "X-Evil": "1", "Host": "evil"})
    hooks.publisher().publish([event])
    (request,) = hooks.receiver.requests
    assert not {"traceparent", "x-evil"} & {name.lower() for name in request.headers}
    assert request.headers.get_all("Host") == [f"127.0.0.1:{hooks.receiver.port}"]


def test_a_valid_traceparent_is_sent_to_the_receiver(hooks: Hooks) -> None:
    hooks.publisher().publish([replace(events("one")[0], headers={"traceparent": TRACE})])
    assert hooks.receiver.requests[0].headers["traceparent"] == TRACE


def test_proxies_of_the_environment_are_ignored_and_cookies_are_not_kept(
    hooks: Hooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:1")
    publisher = hooks.publisher()
    with hooks.receiver.behaving(answering(200, Set_Cookie="visitor=1; Path=/")):
        assert [*publisher.publish(events("one")), *publisher.publish(events("two"))] == [Sent(), Sent()]
    assert [request.headers["Cookie"] for request in hooks.receiver.requests] == [None, None]


def test_a_connection_is_reused_by_the_next_call_even_from_another_thread(hooks: Hooks) -> None:
    publisher = hooks.publisher()
    publisher.publish(events("one"))
    another = threading.Thread(target=publisher.publish, args=(events("two"),))
    another.start()
    another.join()
    assert [request.name for request in hooks.receiver.requests] == ["one", "two"]
    assert hooks.receiver.connections == 1


def test_sixteen_requests_are_sent_at_once_and_never_more(hooks: Hooks) -> None:
    all_have_arrived = threading.Barrier(AT_ONCE)
    lock, current, most = threading.Lock(), 0, 0

    def wait_for_the_others(exchange: Exchange) -> None:
        nonlocal current, most
        with lock:
            current += 1
            most = max(most, current)
        all_have_arrived.wait(30)
        with lock:
            current -= 1
        exchange.answer()

    with hooks.receiver.behaving(wait_for_the_others):
        results = hooks.publisher().publish(events(*map(str, range(3 * AT_ONCE))))
    assert set(results) == {Sent()}
    assert most == AT_ONCE == hooks.receiver.connections


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_events_answered_with_2xx_are_sent(hooks: Hooks, status: int) -> None:
    assert send_one(hooks, lambda exchange: exchange.say(b"HTTP/1.1 %d Well\r\n\r\n" % status)) == Sent()


def test_the_receivers_request_id_is_kept_as_short_printable_text(hooks: Hooks) -> None:
    assert send_one(hooks, answering(200, X_Request_Id="req-1")) == Sent("req-1")
    assert send_one(hooks, answering(200, X_Request_Id="x" * 5000)) == Sent("x" * 200)


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 599])
def test_an_event_for_an_overloaded_receiver_fails_with_the_wait_that_it_asks_for(hooks: Hooks, status: int) -> None:
    result = send_one(hooks, answering(status, b"later", Retry_After="120"))
    assert result == Failed(f"http://127.0.0.1:{hooks.receiver.port} answered {status}: later", 120.0)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308, 304])
def test_a_redirect_is_refused_and_not_followed(hooks: Hooks, status: int) -> None:
    result = send_one(hooks, answering(status, Location=hooks.receiver.url))
    assert isinstance(result, Refused)
    assert f"answered {status}: redirects are not followed" in result.error
    assert len(hooks.receiver.requests) == 1


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 410, 413, 422, 499, 600, 999])
def test_an_event_that_the_receiver_rejects_is_refused_with_the_text_of_the_answer(hooks: Hooks, status: int) -> None:
    body = "no\x00 such\r\n\x1b[31m\u202ething é ".encode() + b"\xff" + b"x" * 70_000
    result = send_one(hooks, answering(status, body))
    assert isinstance(result, Refused)
    said = result.error.removeprefix(f"http://127.0.0.1:{hooks.receiver.port} answered {status}: ")
    assert said == ("no such [31m thing é \N{REPLACEMENT CHARACTER}" + "x" * 200)[:200]


def test_the_error_about_an_empty_answer_says_so(hooks: Hooks) -> None:
    result = send_one(hooks, answering(410))
    assert result == Refused(f"http://127.0.0.1:{hooks.receiver.port} answered 410: (empty body)")


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0", 0.0),
        (" 30 ", 30.0),
        ("86400", 86_400.0),
        ("999999999", 86_400.0),
        (format_datetime(datetime.fromtimestamp(NOON + 90, UTC), usegmt=True), 90.0),
        (format_datetime(datetime.fromtimestamp(NOON + 1e7, UTC), usegmt=True), 86_400.0),
        (format_datetime(datetime.fromtimestamp(NOON - 90, UTC), usegmt=True), None),
        ("Mon, 16 Nov 99999 12:00:00 GMT", None),
        ("Mon, 16 Nov 2026 12:00:00 +99999999", None),
        *((nonsense, None) for nonsense in ("", "-1", "+5", "1.5", "1e9", "inf", "nan", "soon", "９", "9" * 5000)),
    ],
)
def test_retry_after_is_read_as_seconds_or_a_date_and_ignored_if_invalid(value: str, seconds: float | None) -> None:
    assert retry_after_seconds(value.encode(), now=NOON) == seconds


def test_a_silent_server_is_down_and_its_late_answer_is_ignored(hooks: Hooks) -> None:
    too_late, has_answered = threading.Event(), threading.Event()

    def answer_late(exchange: Exchange) -> None:
        too_late.wait(30)
        try:
            exchange.answer()
        finally:
            has_answered.set()

    publisher = hooks.publisher(patience=IMPATIENT)
    with hooks.receiver.behaving(answer_late), pytest.raises(DestinationDown, match=r"no answer within 0\.5 s"):
        publisher.publish(events("one"))
    too_late.set()
    assert has_answered.wait(30)
    publisher.patience = PATIENT
    assert publisher.publish(events("one")) == [Sent()]
    assert [request.headers["Idempotency-Key"] for request in hooks.receiver.requests] == ["1", "1"]


def test_an_answer_whose_head_comes_byte_by_byte_does_not_block_the_relay(hooks: Hooks) -> None:
    beginnings = ("", "HTTP/1.1 2", "HTTP/1.1 200 OK\r\nX-Slow: ")
    publisher = hooks.publisher(patience=IMPATIENT)
    hooks.receiver.behaviour = lambda exchange: exchange.drip(exchange.request_.name.encode(), b"0")
    with pytest.raises(DestinationDown):
        publisher.publish(events(*beginnings))
    assert all(hooks.receiver.hang_ups.acquire(timeout=30) for _ in beginnings)


def test_endless_provisional_answers_do_not_block_the_relay(hooks: Hooks) -> None:
    with pytest.raises(DestinationDown):
        send_one(hooks, lambda exchange: exchange.drip(b"", b"HTTP/1.1 100 Wait\r\n\r\n"), patience=IMPATIENT)
    assert hooks.receiver.hang_ups.acquire(timeout=30)


def test_a_body_that_comes_byte_by_byte_does_not_block_the_relay_and_its_status_counts(hooks: Hooks) -> None:
    def drip(exchange: Exchange) -> None:
        exchange.drip(f"HTTP/1.1 {exchange.request_.name} X\r\nContent-Length: 999999\r\n\r\n".encode(), b".")

    publisher = hooks.publisher(patience=replace(PATIENT, request_seconds=2))  # enough time for the heads to arrive
    with hooks.receiver.behaving(drip):
        results = publisher.publish(events("200", "503", "404"))
    assert [type(result) for result in results] == [Sent, Failed, Refused]
    assert all(hooks.receiver.hang_ups.acquire(timeout=30) for _ in results)


def test_an_endless_body_is_read_up_to_a_limit(hooks: Hooks) -> None:
    endless = b"HTTP/1.1 404 Well\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"2000\r\n" + b"x" * 0x2000 + b"\r\n"
    result = send_one(
        hooks, lambda exchange: exchange.drip(endless, chunk)
    )  # no time limit, so only the size limit can end it
    assert isinstance(result, Refused)
    assert hooks.receiver.hang_ups.acquire(timeout=30)


def test_the_status_counts_even_if_the_body_is_incomplete(hooks: Hooks) -> None:
    broken = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf"
    assert send_one(hooks, lambda exchange: exchange.say(broken)) == Sent()


def test_requests_that_have_not_started_when_the_time_of_a_batch_is_over_are_not_tried(hooks: Hooks) -> None:
    publisher = hooks.publisher(patience=replace(PATIENT, batch_seconds=0))
    results = publisher.publish(events(*map(str, range(AT_ONCE + 4))))
    assert results == [Sent()] * AT_ONCE + [NotTried()] * 4
    assert len(hooks.receiver.requests) == AT_ONCE


def test_the_time_limits_together_are_well_below_a_lease() -> None:
    assert Patience().batch_seconds + Patience().request_seconds <= 30


def test_a_silent_name_server_does_not_block_the_relay(hooks: Hooks) -> None:
    is_over = threading.Event()

    def look_up_slowly(host: str, port: int) -> list[str]:
        is_over.wait(60)
        return []

    patience = replace(PATIENT, connect_seconds=0.5)
    publisher = hooks.publisher("http://hooks.example/", resolve=look_up_slowly, patience=patience)
    with pytest.raises(DestinationDown, match=r"no connection within 0\.5 s"):
        publisher.publish(events("one"))
    publisher.close()
    assert not is_over.is_set()
    is_over.set()


@pytest.mark.parametrize("addresses", [[], OSError("Name or service not known")], ids=["none", "error"])
def test_a_destination_whose_name_has_no_address_is_down(hooks: Hooks, addresses: list[str] | OSError) -> None:
    publisher = hooks.publisher("http://hooks.example/", resolve=resolving(addresses))
    with pytest.raises(DestinationDown, match=r"^http://hooks\.example:80 is unreachable: no connection: the name"):
        publisher.publish(events("one"))


def test_the_next_address_is_tried_if_one_does_not_accept_a_connection(hooks: Hooks) -> None:
    resolve = resolving(["127.0.0.2", "::1", "127.0.0.1"])  # the receiver listens at the last one only
    url = f"http://hooks.example:{hooks.receiver.port}/"
    assert hooks.publisher(url, resolve=resolve).publish(events("one")) == [Sent()]


def test_an_event_without_an_answer_fails_alone_if_others_got_one(hooks: Hooks) -> None:
    def hang_up_on_one(exchange: Exchange) -> None:
        exchange.say(b"") if exchange.request_.name == "bad" else exchange.answer()

    with hooks.receiver.behaving(hang_up_on_one):
        good, bad, also_good = hooks.publisher().publish(events("good", "bad", "also good"))
    assert [good, also_good] == [Sent(), Sent()]
    assert bad == Failed("no answer: it closed the connection without an answer, or does not speak HTTP")


def test_if_the_first_sixteen_requests_get_no_answer_the_others_are_not_tried(hooks: Hooks) -> None:
    with hooks.receiver.behaving(lambda exchange: exchange.say(b"")), pytest.raises(DestinationDown):
        hooks.publisher().publish(events(*map(str, range(200))))
    assert AT_ONCE <= len(hooks.receiver.requests) < 2 * AT_ONCE


def test_if_one_of_the_first_requests_gets_an_answer_all_are_tried(hooks: Hooks) -> None:
    answer_was_read = threading.Event()

    def answer_only_one(exchange: Exchange) -> None:
        if exchange.request_.name == "0":
            return exchange.answer(503)
        if len(hooks.receiver.requests) > AT_ONCE:  # the next one was sent in its place
            answer_was_read.set()
        answer_was_read.wait(30)
        return exchange.say(b"")

    with hooks.receiver.behaving(answer_only_one):
        results = hooks.publisher().publish(events(*map(str, range(50))))
    assert {type(result) for result in results} == {Failed}
    assert len(hooks.receiver.requests) == 50


@pytest.mark.parametrize(
    ("address", "secret", "reason"),
    [
        ("http://hooks.example/canary", "k", "use https://"),
        ("ftp://hooks.example/canary", "k", "must be an https:// address"),
        ("https:///canary", "k", "must be an https:// address"),
        ("https://canary\n/", "k", "must be an https:// address"),
        ("https://hooks.example:0/canary", "k", "has port 0"),
        ("https://hooks.example:65536/canary", "k", "has port 65536"),
        ("https://hooks.example/canary", "", "secret is empty"),
    ],
)
def test_each_event_for_an_unusable_address_is_refused_without_showing_it(
    address: str, secret: str, reason: str
) -> None:
    results = HttpPublisher(address, secret=secret).publish(events("one", "two"))
    assert len(results) == 2
    for result in results:
        assert isinstance(result, Refused)
        assert reason in result.error
        assert "canary" not in result.error


def echo(exchange: Exchange) -> bytes:
    return f"Cannot POST {exchange.path} for\n{exchange.headers}".encode()


REVEALING: dict[str, Callable[[Exchange], None]] = {
    "ok": lambda exchange: exchange.answer(200, echo(exchange), X_Request_Id=exchange.path),
    "not found": lambda exchange: exchange.answer(404, echo(exchange)),
    "decoded": lambda exchange: exchange.answer(404, b"no canary+path, no canary query, CANARYpassword"),
    "broken": lambda exchange: exchange.answer(500, echo(exchange), Retry_After="canary"),
    "redirect": lambda exchange: exchange.answer(302, echo(exchange), Location=exchange.path),
    "echo": lambda exchange: exchange.say(exchange.requestline.encode() + b"\r\n\r\n"),
    "hangs up": lambda exchange: exchange.say(b""),
    "hangs": Exchange.hang,
}


@pytest.mark.parametrize("what", [*REVEALING, "no server", "no TLS", "forbidden", "unknown"])
def test_no_error_and_no_log_shows_a_secret_or_more_of_an_address_than_its_origin(
    what: str, hooks: Hooks, caplog: pytest.LogCaptureFixture
) -> None:
    port = 1 if what == "no server" else hooks.receiver.port
    host = "unknown..example" if what == "unknown" else "127.0.0.1"
    scheme = "https" if what == "no TLS" else "http"
    publisher = hooks.publisher(
        f"{scheme}://canaryuser:canarypassword@{host}:{port}/canary%2Bpath/x?t=canary%20query",
        secret="canarykey",
        allow_private=what != "forbidden",
        patience=IMPATIENT if what == "hangs" else PATIENT,
    )
    shown: list[str] = []
    with caplog.at_level(logging.DEBUG), hooks.receiver.behaving(REVEALING.get(what, Exchange.hang)):
        try:
            shown += map(repr, publisher.publish(events("one")))
        except DestinationDown as error:
            shown += [error.message, repr(error.__cause__), repr(error.__context__)]
    assert shown
    assert (f"{scheme}://{host}:{port} " in shown[0]) == (what != "ok")
    assert "canary" not in "".join([*shown, repr(publisher), caplog.text]).lower()
    assert "Y2FuYXJ5" not in "".join([*shown, caplog.text])  # the beginning of the credentials in base64
