"""What only the publisher of webhooks does: what it sends, how it reads answers, how long it waits, what it hides."""

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
from outbox.publishers.http_post import AT_ONCE, Patience, retry_after_seconds
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
    """RFC 2104, written out."""
    block = key.ljust(64, b"\0")
    inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in block) + message).digest()
    return hashlib.sha256(bytes(byte ^ 0x5C for byte in block) + inner).hexdigest()


def test_a_request_is_the_payload_with_a_key_and_a_signature_that_others_can_check(hooks: Hooks) -> None:
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


def test_without_a_secret_nothing_pretends_to_be_signed(hooks: Hooks) -> None:
    hooks.publisher().publish(events("one"))
    assert "Celeriac-Signature" not in hooks.receiver.requests[0].headers


def test_an_address_keeps_its_query_and_its_credentials_become_a_header(hooks: Hooks) -> None:
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
def test_a_row_cannot_add_a_header(hooks: Hooks, traceparent: Any) -> None:
    event = replace(events("one")[0], headers={"traceparent": traceparent, "X-Evil": "1", "Host": "evil"})
    hooks.publisher().publish([event])
    (request,) = hooks.receiver.requests
    assert not {"traceparent", "x-evil"} & {name.lower() for name in request.headers}
    assert request.headers.get_all("Host") == [f"127.0.0.1:{hooks.receiver.port}"]


def test_a_trace_goes_on_in_the_receiver(hooks: Hooks) -> None:
    hooks.publisher().publish([replace(events("one")[0], headers={"traceparent": TRACE})])
    assert hooks.receiver.requests[0].headers["traceparent"] == TRACE


def test_the_environment_names_no_proxy_and_a_cookie_is_not_kept(hooks: Hooks, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:1")
    publisher = hooks.publisher()
    with hooks.receiver.behaving(answering(200, Set_Cookie="visitor=1; Path=/")):
        assert [*publisher.publish(events("one")), *publisher.publish(events("two"))] == [Sent(), Sent()]
    assert [request.headers["Cookie"] for request in hooks.receiver.requests] == [None, None]


def test_a_connection_is_used_again_by_the_next_call_even_from_another_thread(hooks: Hooks) -> None:
    publisher = hooks.publisher()
    publisher.publish(events("one"))
    another = threading.Thread(target=publisher.publish, args=(events("two"),))
    another.start()
    another.join()
    assert [request.name for request in hooks.receiver.requests] == ["one", "two"]
    assert hooks.receiver.connections == 1


def test_sixteen_requests_are_on_their_way_at_once_and_never_more(hooks: Hooks) -> None:
    all_are_here = threading.Barrier(AT_ONCE)
    lock, here, most = threading.Lock(), 0, 0

    def meet(exchange: Exchange) -> None:
        nonlocal here, most
        with lock:
            here += 1
            most = max(most, here)
        all_are_here.wait(30)
        with lock:
            here -= 1
        exchange.answer()

    with hooks.receiver.behaving(meet):
        results = hooks.publisher().publish(events(*map(str, range(3 * AT_ONCE))))
    assert set(results) == {Sent()}
    assert most == AT_ONCE == hooks.receiver.connections


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_two_hundreds_are_sent(hooks: Hooks, status: int) -> None:
    assert send_one(hooks, lambda exchange: exchange.say(b"HTTP/1.1 %d Well\r\n\r\n" % status)) == Sent()


def test_the_receivers_own_id_is_kept_as_short_clean_text(hooks: Hooks) -> None:
    assert send_one(hooks, answering(200, X_Request_Id="req-1")) == Sent("req-1")
    assert send_one(hooks, answering(200, X_Request_Id="x" * 5000)) == Sent("x" * 200)


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 599])
def test_an_overloaded_or_broken_receiver_is_tried_again_when_it_says(hooks: Hooks, status: int) -> None:
    result = send_one(hooks, answering(status, b"later", Retry_After="120"))
    assert result == Failed(f"http://127.0.0.1:{hooks.receiver.port} answered {status}: later", 120.0)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308, 304])
def test_a_redirect_is_refused_and_not_followed(hooks: Hooks, status: int) -> None:
    result = send_one(hooks, answering(status, Location=hooks.receiver.url))
    assert isinstance(result, Refused)
    assert f"answered {status}: redirects are not followed" in result.error
    assert len(hooks.receiver.requests) == 1


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 410, 413, 422, 499, 600, 999])
def test_a_receiver_that_does_not_want_an_event_refuses_it_in_its_own_words(hooks: Hooks, status: int) -> None:
    words = "no\x00 such\r\n\x1b[31m\u202ething é ".encode() + b"\xff" + b"x" * 70_000
    result = send_one(hooks, answering(status, words))
    assert isinstance(result, Refused)
    said = result.error.removeprefix(f"http://127.0.0.1:{hooks.receiver.port} answered {status}: ")
    assert said == ("no such [31m thing é \N{REPLACEMENT CHARACTER}" + "x" * 200)[:200]


def test_an_answer_without_a_word_is_a_sentence_all_the_same(hooks: Hooks) -> None:
    result = send_one(hooks, answering(410))
    assert result == Refused(f"http://127.0.0.1:{hooks.receiver.port} answered 410: without a word")


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
def test_retry_after_is_seconds_or_a_date_and_never_nonsense(value: str, seconds: float | None) -> None:
    assert retry_after_seconds(value.encode(), now=NOON) == seconds


def test_a_silent_server_is_down_and_a_late_answer_counts_for_nothing(hooks: Hooks) -> None:
    too_late, has_answered = threading.Event(), threading.Event()

    def answer_late(exchange: Exchange) -> None:
        too_late.wait(30)
        try:
            exchange.answer()
        finally:
            has_answered.set()

    publisher = hooks.publisher(patience=IMPATIENT)
    with hooks.receiver.behaving(answer_late), pytest.raises(DestinationDown, match=r"nothing within 0\.5 s"):
        publisher.publish(events("one"))
    too_late.set()
    assert has_answered.wait(30)
    publisher.patience = PATIENT
    assert publisher.publish(events("one")) == [Sent()]
    assert [request.headers["Idempotency-Key"] for request in hooks.receiver.requests] == ["1", "1"]


def test_a_head_that_comes_byte_by_byte_does_not_hold_the_relay(hooks: Hooks) -> None:
    beginnings = ("", "HTTP/1.1 2", "HTTP/1.1 200 OK\r\nX-Slow: ")
    publisher = hooks.publisher(patience=IMPATIENT)
    hooks.receiver.behaviour = lambda exchange: exchange.drip(exchange.request_.name.encode(), b"0")
    with pytest.raises(DestinationDown):
        publisher.publish(events(*beginnings))
    assert all(hooks.receiver.hang_ups.acquire(timeout=30) for _ in beginnings)


def test_provisional_answers_without_end_do_not_hold_the_relay(hooks: Hooks) -> None:
    with pytest.raises(DestinationDown):
        send_one(hooks, lambda exchange: exchange.drip(b"", b"HTTP/1.1 100 Wait\r\n\r\n"), patience=IMPATIENT)
    assert hooks.receiver.hang_ups.acquire(timeout=30)


def test_a_body_that_comes_byte_by_byte_does_not_hold_the_relay_and_its_status_counts(hooks: Hooks) -> None:
    def drip(exchange: Exchange) -> None:
        exchange.drip(f"HTTP/1.1 {exchange.request_.name} X\r\nContent-Length: 999999\r\n\r\n".encode(), b".")

    publisher = hooks.publisher(patience=replace(PATIENT, request_seconds=2))  # time enough for the heads to come
    with hooks.receiver.behaving(drip):
        results = publisher.publish(events("200", "503", "404"))
    assert [type(result) for result in results] == [Sent, Failed, Refused]
    assert all(hooks.receiver.hang_ups.acquire(timeout=30) for _ in results)


def test_a_body_without_end_is_read_to_a_limit_only(hooks: Hooks) -> None:
    endless = b"HTTP/1.1 404 Well\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"2000\r\n" + b"x" * 0x2000 + b"\r\n"
    result = send_one(hooks, lambda exchange: exchange.drip(endless, chunk))  # with patience: only the limit ends it
    assert isinstance(result, Refused)
    assert hooks.receiver.hang_ups.acquire(timeout=30)


def test_a_body_that_breaks_off_does_not_unsay_the_status(hooks: Hooks) -> None:
    broken = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf"
    assert send_one(hooks, lambda exchange: exchange.say(broken)) == Sent()


def test_what_has_not_begun_when_the_time_of_a_batch_is_over_is_not_tried(hooks: Hooks) -> None:
    publisher = hooks.publisher(patience=replace(PATIENT, batch_seconds=0))
    results = publisher.publish(events(*map(str, range(AT_ONCE + 4))))
    assert results == [Sent()] * AT_ONCE + [NotTried()] * 4
    assert len(hooks.receiver.requests) == AT_ONCE


def test_the_limits_together_are_well_below_a_lease() -> None:
    assert Patience().batch_seconds + Patience().request_seconds <= 30


def test_a_name_server_that_does_not_answer_does_not_hold_the_relay(hooks: Hooks) -> None:
    is_over = threading.Event()

    def look_up_for_long(host: str, port: int) -> list[str]:
        is_over.wait(60)
        return []

    patience = replace(PATIENT, connect_seconds=0.5)
    publisher = hooks.publisher("http://hooks.example/", resolve=look_up_for_long, patience=patience)
    with pytest.raises(DestinationDown, match=r"no connection within 0\.5 s"):
        publisher.publish(events("one"))
    publisher.close()
    assert not is_over.is_set()
    is_over.set()


@pytest.mark.parametrize("addresses", [[], OSError("Name or service not known")], ids=["none", "error"])
def test_a_name_without_an_address_is_down(hooks: Hooks, addresses: list[str] | OSError) -> None:
    publisher = hooks.publisher("http://hooks.example/", resolve=resolving(addresses))
    with pytest.raises(DestinationDown, match=r"^http://hooks\.example:80 does not answer: no connection: the name"):
        publisher.publish(events("one"))


def test_the_next_address_is_tried_when_one_is_dead(hooks: Hooks) -> None:
    resolve = resolving(["127.0.0.2", "::1", "127.0.0.1"])  # the receiver listens at the last one only
    url = f"http://hooks.example:{hooks.receiver.port}/"
    assert hooks.publisher(url, resolve=resolve).publish(events("one")) == [Sent()]


def test_an_event_without_an_answer_fails_alone_when_others_have_one(hooks: Hooks) -> None:
    def hang_up_on_one(exchange: Exchange) -> None:
        exchange.say(b"") if exchange.request_.name == "bad" else exchange.answer()

    with hooks.receiver.behaving(hang_up_on_one):
        good, bad, also_good = hooks.publisher().publish(events("good", "bad", "also good"))
    assert [good, also_good] == [Sent(), Sent()]
    assert bad == Failed("no answer: it hung up without an answer, or does not speak HTTP")


def test_when_the_first_sixteen_get_no_answer_the_others_are_not_even_tried(hooks: Hooks) -> None:
    with hooks.receiver.behaving(lambda exchange: exchange.say(b"")), pytest.raises(DestinationDown):
        hooks.publisher().publish(events(*map(str, range(200))))
    assert AT_ONCE <= len(hooks.receiver.requests) < 2 * AT_ONCE


def test_one_answer_among_the_first_is_reason_enough_to_try_them_all(hooks: Hooks) -> None:
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
        ("ftp://hooks.example/canary", "k", "no https:// address"),
        ("https:///canary", "k", "no https:// address"),
        ("https://canary\n/", "k", "no https:// address"),
        ("https://hooks.example:0/canary", "k", "the port 0"),
        ("https://hooks.example:65536/canary", "k", "the port 65536"),
        ("https://hooks.example/canary", "", "secret is empty"),
    ],
)
def test_an_address_that_cannot_be_used_refuses_each_event(address: str, secret: str, reason: str) -> None:
    results = HttpPublisher(address, secret=secret).publish(events("one", "two"))
    assert len(results) == 2
    for result in results:
        assert isinstance(result, Refused)
        assert reason in result.error
        assert "canary" not in result.error


def echo(exchange: Exchange) -> bytes:
    return f"Cannot POST {exchange.path} for\n{exchange.headers}".encode()


TELLTALES: dict[str, Callable[[Exchange], None]] = {
    "well": lambda exchange: exchange.answer(200, echo(exchange), X_Request_Id=exchange.path),
    "not found": lambda exchange: exchange.answer(404, echo(exchange)),
    "decoded": lambda exchange: exchange.answer(404, b"no canary+path, no canary query, CANARYpassword"),
    "broken": lambda exchange: exchange.answer(500, echo(exchange), Retry_After="canary"),
    "redirect": lambda exchange: exchange.answer(302, echo(exchange), Location=exchange.path),
    "echo": lambda exchange: exchange.say(exchange.requestline.encode() + b"\r\n\r\n"),
    "hangs up": lambda exchange: exchange.say(b""),
    "hangs": Exchange.hang,
}


@pytest.mark.parametrize("what", [*TELLTALES, "nobody there", "no TLS", "forbidden", "unknown"])
def test_no_part_of_an_address_but_its_origin_and_no_key_is_ever_told(
    what: str, hooks: Hooks, caplog: pytest.LogCaptureFixture
) -> None:
    port = 1 if what == "nobody there" else hooks.receiver.port
    host = "unknown..example" if what == "unknown" else "127.0.0.1"
    scheme = "https" if what == "no TLS" else "http"
    publisher = hooks.publisher(
        f"{scheme}://canaryuser:canarypassword@{host}:{port}/canary%2Bpath/x?t=canary%20query",
        secret="canarykey",
        allow_private=what != "forbidden",
        patience=IMPATIENT if what == "hangs" else PATIENT,
    )
    told: list[str] = []
    with caplog.at_level(logging.DEBUG), hooks.receiver.behaving(TELLTALES.get(what, Exchange.hang)):
        try:
            told += map(repr, publisher.publish(events("one")))
        except DestinationDown as error:
            told += [error.message, repr(error.__cause__), repr(error.__context__)]
    assert told
    assert (f"{scheme}://{host}:{port} " in told[0]) == (what != "well")
    assert "canary" not in "".join([*told, repr(publisher), caplog.text]).lower()
    assert "Y2FuYXJ5" not in "".join([*told, caplog.text])  # the beginning of the credentials in base64
