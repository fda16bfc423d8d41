"""http.request: write an outbox event in the task's own transaction; the outbox delivers it."""

from __future__ import annotations

import json
from typing import Any

import pytest

import outbox
import settings
from outbox.after_commit_publisher import after_commit_publisher
from outbox.relay import Relay
from tests.outbox.ledger import rows
from tests.tasks.deliveries import delivered, submitted, take_away
from tests.tasks.work import task
from tests.workflows.conftest import Configure
from tests.workflows.outside import KEY, Outside

TYPE = "http.request"
TO_CRM = "destination = 'crm'"


def run_request(payload: Any, **options: Any) -> dict[str, Any]:
    (id_,) = submitted(1, TYPE, payload, **options)
    delivered([id_])
    return task(id_)


def relay_once() -> None:
    assert after_commit_publisher().wait_until_idle(20)
    relay = Relay.of(settings.current())
    relay.tick()
    relay.close()


def test_the_event_is_written_with_the_task_and_delivered_later(outside: Outside) -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    done = run_request({"destination": "crm", "body": {"order": 17}}, context={"traceparent": trace})
    ((event_id,),) = rows("id", TO_CRM)
    assert (done["status"], done["result"]) == ("SUCCEEDED", {"eventId": event_id})
    relay_once()
    (request,) = outside.requests
    assert (json.loads(request.body), request.headers["traceparent"]) == ({"order": 17}, trace)
    assert request.headers[KEY] == str(event_id)
    assert rows("status", TO_CRM) == [("SENT",)]


def test_a_task_that_loses_its_lease_sends_nothing(outside: Outside, monkeypatch: pytest.MonkeyPatch) -> None:
    add = outbox.add

    def lose_lease_and_add(*given: Any, **options: Any) -> int:
        take_away(id_)
        return add(*given, **options)

    monkeypatch.setattr(outbox, "add", lose_lease_and_add)
    (id_,) = submitted(1, TYPE, {"destination": "crm", "body": 1})
    delivered([id_])
    relay_once()
    assert (rows("id", TO_CRM), outside.requests) == ([], [])


def test_requests_of_one_ordering_key_keep_their_order(outside: Outside) -> None:
    for number in range(3):
        run_request({"destination": "crm", "body": number, "orderingKey": "customer 1"})
    for _ in range(3):
        relay_once()
    assert [json.loads(request.body) for request in outside.requests] == [0, 1, 2]


def test_the_ordering_key_of_one_principal_does_not_block_that_of_another(outside: Outside) -> None:
    for principal in ("alice", "bob"):
        payload = {"destination": "crm", "body": principal, "orderingKey": "customer 1"}
        run_request(payload, context={"principal": principal})
    assert sorted(rows("ordering_key", TO_CRM)) == [("alice:customer 1",), ("bob:customer 1",)]


def test_an_invalid_request_is_dead_with_a_message_and_leaves_no_event(outside: Outside, configure: Configure) -> None:
    configure({"told": "redis-stream://h/0?stream=s", "old": "http://h/x"})
    for payload, sentence in [
        (None, "The request is invalid: "),
        ({"body": 1}, "The request is invalid: `destination` is required."),
        ({"destination": "told", "url": "http://h"}, "The request is invalid: `url`: extra inputs"),
        ({"destination": "told", "orderingKey": ""}, "The request is invalid: `orderingKey`: "),
        ({"destination": "nowhere"}, "There is no destination 'nowhere'"),
        ({"destination": "celery:ingest"}, "There is no destination 'celery:ingest'"),
        ({"destination": "told"}, "'told' has no https:// address"),
        ({"destination": "old"}, "The destination's address is http://"),
    ]:
        done = run_request(payload)
        assert (done["status"], done["error_code"]) == ("DEAD", "permanent"), payload
        assert sentence in done["error_message"]
    assert rows("id", "destination NOT LIKE 'celery:%'") == []
