"""A service behind HTTP: every attempt sends the same key, and an operator is never told more than is known."""

from __future__ import annotations

import hmac
import json
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from models.errors import Unreachable
from sinks.configuration import open_sinks
from sinks.contract import Effect, EffectState, SinkNotReady
from sinks.http import KeyedHttp
from tasks.core.task import Task
from tests.outbox.publishers.http_cases import Exchange
from tests.servers import ServersOfTests
from tests.sinks.places import HttpPlace
from tests.tasks.deliveries import delivered, handled, submitted
from tests.tasks.lost_workers import killed, later, reclaim_lost
from tests.tasks.outside import TYPE, ran, state
from tests.tasks.work import task as row
from tests.workflows.outside import KEY, Outside, answering

SECRET = "hunter2 is secret"
LIFE = timedelta(hours=24)


@pytest.fixture
def service(configure: Callable[..., None]) -> Iterator[Outside]:
    """A payment service: the sinks `psp` and `crm` at the same host."""
    service = Outside()
    configure(psp=setting(service), crm=setting(service))
    yield service
    service.end()


def setting(service: Outside, options: str = "&allow_private=1&allow_http=1") -> dict[str, Any]:
    secret = SECRET.replace(" ", "%20")
    return {"url": f"http://127.0.0.1:{service.port}/charge?account=7&secret={secret}{options}", "guarantee": "keyed"}


def charge(task: Task) -> Any:
    return task.sink("psp").post({"amount": 100}, step="charge")


def effects(id_: uuid.UUID) -> list[tuple[EffectState, str | None]]:
    found = open_sinks().find("psp").effects(open_sinks().installation(), id_)
    assert {effect.step for effect in found} <= {"charge"}
    return [(effect.state, effect.detail) for effect in found]


UNKNOWN = [(EffectState.UNKNOWN, "sent, but not confirmed; the service cannot be asked")]
REFUSED = [(EffectState.NOT_COMMITTED, "refused, or not sent")]


def test_the_request_has_a_key_and_a_signature_and_its_answer_is_returned(service: Outside) -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    with handled(TYPE, charge, transactional=False):
        (id_,) = submitted(1, TYPE, context={"traceparent": trace})
        delivered([id_])
    assert row(id_)["result"] == {"status": 200, "body": {"customer": "Ada", "asked": {"amount": 100}}}
    (request,) = service.requests
    key = f"{open_sinks().installation()}-{id_}-psp-charge"
    assert (request.target, request.body) == ("/charge?account=7", b'{"amount":100}')
    assert (request.headers[KEY], request.headers["traceparent"]) == (key, trace)
    signed = f"{key}.{request.headers['Celeriac-Timestamp']}.".encode() + request.body
    assert request.headers["Celeriac-Signature"] == f"v1={hmac.digest(SECRET.encode(), signed, 'sha256').hex()}"
    assert effects(id_) == [(EffectState.COMMITTED, "answered 200")]


@pytest.mark.guarantee
def test_a_retry_returns_the_stored_answer_and_sends_nothing(service: Outside) -> None:
    def charge_and_fail_once(task: Task) -> Any:
        answered = charge(task)
        if task.attempt_count == 0:
            raise KeyError("no")
        return answered

    id_ = ran(charge_and_fail_once, times=2)
    assert (state(id_)[0], row(id_)["result"]["status"], len(service.requests)) == ("SUCCEEDED", 200, 1)


@pytest.mark.guarantee
def test_two_sinks_or_steps_at_one_service_never_share_a_key(service: Outside) -> None:
    def post(task: Task) -> None:
        for sink in ("psp", "crm"):
            for step in ("a", "a ", "ä", "effect", "a/b", "a%2Fb"):
                task.sink(sink).post(sink + step, step=step)

    assert state(ran(post))[0] == "SUCCEEDED"
    assert len(service.effects) == 12
    assert all(key.isascii() and key.isprintable() for key in service.effects)


@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("status", "ends", "known"),
    [
        (302, "DEAD", REFUSED),
        (400, "DEAD", REFUSED),
        (402, "DEAD", REFUSED),
        (408, "RETRYING", UNKNOWN),
        (409, "RETRYING", UNKNOWN),
        (425, "RETRYING", UNKNOWN),
        (429, "RETRYING", UNKNOWN),
        (500, "RETRYING", UNKNOWN),
        (503, "RETRYING", UNKNOWN),
    ],
)
def test_what_an_answer_means_for_the_task_and_for_the_operator(
    service: Outside, status: int, ends: str, known: Any
) -> None:
    service.behaviour = answering(status, b"no account=7 and no hunter2 is secret", Retry_After="3600")
    id_ = ran(charge)
    failed = row(id_)
    assert (failed["status"], effects(id_)) == (ends, known)
    assert f"answered {status}" in failed["error_message"]
    if ends == "RETRYING":
        assert failed["next_retry_at"] - failed["updated_at"] > timedelta(seconds=3500)
        assert failed["error_code"] == "handler_error"
    else:
        assert failed["error_code"] == "permanent"


def hang_up(exchange: Exchange) -> None:
    exchange.say(b"")


def break_off(exchange: Exchange) -> None:
    exchange.say(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"half')


@pytest.mark.guarantee
@pytest.mark.parametrize("behaviour", [hang_up, break_off])
def test_a_request_without_a_complete_answer_is_sent_again_with_the_same_key(
    service: Outside, behaviour: Callable[[Exchange], None]
) -> None:
    with handled(TYPE, charge, transactional=False, backoff=[0]):
        (id_,) = submitted(1, TYPE)
        with service.behaving(behaviour):
            delivered([id_])
        assert (state(id_), effects(id_)) == (("RETRYING", 1, "handler_error"), UNKNOWN)
        delivered([id_])
    assert (state(id_)[0], effects(id_)[0][0]) == ("SUCCEEDED", EffectState.COMMITTED)
    assert [len(service.effects), len(service.requests), len(service.calls)] == [1, 2, 1]


@pytest.mark.guarantee
def test_a_refusal_after_an_unconfirmed_request_does_not_say_that_nothing_happened(service: Outside) -> None:
    """The service may have performed the first request, and refuse the second because its payload differs."""
    with handled(TYPE, charge, transactional=False, backoff=[0]):
        (id_,) = submitted(1, TYPE)
        for behaviour in (hang_up, answering(422)):
            with service.behaving(behaviour):
                delivered([id_])
    assert (state(id_)[0], effects(id_)) == ("DEAD", UNKNOWN)


@pytest.mark.guarantee
@pytest.mark.parametrize("window", HttpPlace.windows)
def test_an_operator_is_told_what_is_known_about_a_killed_worker(
    service: Outside, ledger: ServersOfTests, window: str
) -> None:
    with handled(TYPE, charge, transactional=False, backoff=[0]):
        (id_,) = submitted(1, TYPE)
        killed([id_], f"{window}=kill")
        known = [(EffectState.COMMITTED, "answered 200")] if window == "http.after_keep" else UNKNOWN
        assert effects(id_) == known
        reclaim_lost(ledger)
        later(ledger, 3600)
        delivered([id_])
    assert (state(id_)[0], effects(id_)) == ("SUCCEEDED", [(EffectState.COMMITTED, "answered 200")])
    assert len(service.effects) == 1


@pytest.mark.parametrize(
    ("body", "returned"),
    [
        (b"", None),
        (b"paid", "paid"),
        (b'"paid"', "paid"),
        (b"[1.5]", [1.5]),
        (b"NaN", "NaN"),
        (b'"\\ud800"', '"\\ud800"'),
        (b"[" * 100 + b"]" * 100, "[" * 100 + "]" * 100),
        (b"\x00\xff", "\N{REPLACEMENT CHARACTER}" * 2),
        (b"1" * 70_000, None),
    ],
)
def test_an_effect_is_committed_whatever_the_body_of_the_answer_is(
    service: Outside, body: bytes, returned: Any
) -> None:
    service.behaviour = answering(201, body)
    id_ = ran(charge)
    assert (state(id_)[0], row(id_)["result"]) == ("SUCCEEDED", {"status": 201, "body": returned})
    assert effects(id_) == [(EffectState.COMMITTED, "answered 201")]


def test_a_loop_without_steps_fails_instead_of_losing_effects(service: Outside) -> None:
    id_ = ran(lambda task: [task.sink("psp").post(n) for n in range(2)])
    assert "give each effect its own `step`" in row(id_)["error_message"]
    assert [json.loads(request.body) for request in service.requests] == [0]


def test_a_step_whose_key_would_be_cut_off_is_refused(service: Outside) -> None:
    id_ = ran(lambda task: task.sink("psp").post(1, step="x" * 190))
    assert "too long a name" in row(id_)["error_message"]
    assert service.requests == []


def test_a_private_address_is_refused_and_nothing_is_sent(service: Outside, configure: Callable[..., None]) -> None:
    configure(psp=setting(service, "&allow_http=1"))
    id_ = ran(charge)
    assert (state(id_)[0], service.requests) == ("RETRYING", [])
    assert "SinkNotReady: http://127.0.0.1" in row(id_)["error_message"]
    assert "private address" in row(id_)["error_message"]
    assert effects(id_) == REFUSED


def test_a_service_is_checked_without_a_request(service: Outside) -> None:
    sink = open_sinks().find("psp")
    assert sink.check() == f"http://127.0.0.1:{service.port} accepts connections"
    assert service.requests == []


@pytest.mark.parametrize(
    ("url", "error", "sentence"),
    [
        ("http://127.0.0.1:1/x?secret=hunter2&allow_private=1", SinkNotReady, "add allow_http=1"),
        ("https://127.0.0.1:1/x?secret=hunter2", SinkNotReady, "sink psp cannot be used: 127.0.0.1 is a private"),
        ("https://127.0.0.1:1/x?secret=hunter2&allow_private=1", Unreachable, "https://127.0.0.1:1 is unreachable"),
        ("https://[::1/?secret=hunter2", SinkNotReady, "it is not a URL"),
        ("https:///x?secret=hunter2", SinkNotReady, "must be an https:// address with a host"),
    ],
)
def test_an_address_that_cannot_be_used_is_a_sentence_without_its_secret(
    url: str, error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence) as refused:
        KeyedHttp("psp", url, key_life=LIFE).check()
    assert "hunter2" not in str(refused.value)


def test_a_task_that_sent_nothing_has_no_effects(service: Outside) -> None:
    id_ = ran(lambda _task: None)
    assert effects(id_) == []
    assert Effect("psp", EffectState.UNKNOWN) not in open_sinks().find("crm").effects(uuid.uuid4(), id_)
