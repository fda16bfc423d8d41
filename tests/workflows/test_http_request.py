"""http.request: handed over to the outbox in the task's own transaction, and delivered from there."""

from __future__ import annotations

import json
from typing import Any

import pytest

import outbox
import settings
from outbox.after_commit_publisher import submitter
from outbox.relay import Relay
from tests.outbox.ledger import rows
from tests.tasks.deliveries import delivered, submitted, take_away
from tests.tasks.work import task
from tests.workflows.conftest import Configure
from tests.workflows.outside import KEY, Outside

TYPE = "http.request"
OF_CRM = "destination = 'crm'"


def requested(payload: Any, **how: Any) -> dict[str, Any]:
    (id_,) = submitted(1, TYPE, payload, **how)
    delivered([id_])
    return task(id_)


def relayed() -> None:
    assert submitter().flush(20)
    relay = Relay.of(settings.current())
    relay.tick()
    relay.close()


def test_succeeded_means_handed_over_and_the_event_tells_the_rest(outside: Outside) -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    done = requested({"destination": "crm", "body": {"order": 17}}, context={"traceparent": trace})
    ((event_id,),) = rows("id", OF_CRM)
    assert (done["status"], done["result"]) == ("SUCCEEDED", {"eventId": event_id})
    relayed()
    (request,) = outside.requests
    assert (json.loads(request.body), request.headers["traceparent"]) == ({"order": 17}, trace)
    assert request.headers[KEY] == str(event_id)
    assert rows("status", OF_CRM) == [("SENT",)]


def test_a_task_that_loses_its_lease_sends_nothing(outside: Outside, monkeypatch: pytest.MonkeyPatch) -> None:
    add = outbox.add

    def add_and_lose(*given: Any, **how: Any) -> int:
        take_away(id_)
        return add(*given, **how)

    monkeypatch.setattr(outbox, "add", add_and_lose)
    (id_,) = submitted(1, TYPE, {"destination": "crm", "body": 1})
    delivered([id_])
    relayed()
    assert (rows("id", OF_CRM), outside.requests) == ([], [])


def test_requests_of_one_ordering_key_keep_their_order(outside: Outside) -> None:
    for number in range(3):
        requested({"destination": "crm", "body": number, "orderingKey": "customer 1"})
    for _ in range(3):
        relayed()
    assert [json.loads(request.body) for request in outside.requests] == [0, 1, 2]


def test_what_cannot_be_sent_is_dead_with_a_sentence_and_leaves_no_event(
    outside: Outside, configure: Configure
) -> None:
    configure({"told": "redis-stream://h/0?stream=s", "old": "http://h/x"})
    for payload, sentence in [
        (None, "The request cannot be sent: "),
        ({"body": 1}, "The request cannot be sent: destination: Field required."),
        ({"destination": "told", "url": "http://h"}, "The request cannot be sent: url: Extra inputs"),
        ({"destination": "told", "orderingKey": ""}, "The request cannot be sent: orderingKey: "),
        ({"destination": "nowhere"}, "There is no destination 'nowhere'"),
        ({"destination": "celery:ingest"}, "There is no destination 'celery:ingest'"),
        ({"destination": "told"}, "'told' has no https:// address"),
        ({"destination": "old"}, "The destination's address is http://"),
    ]:
        done = requested(payload)
        assert (done["status"], done["error_code"]) == ("DEAD", "permanent"), payload
        assert sentence in done["error_message"]
    assert rows("id", "destination NOT LIKE 'celery:%'") == []
