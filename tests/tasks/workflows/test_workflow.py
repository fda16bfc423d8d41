"""A workflow from its payload to its result: every kind of stage, what is kept, and what each failure leads to."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
from datetime import timedelta
from typing import Any

import pytest

from models.engine import engine
from tasks import Permanent, Snooze, dead_letters
from tasks.registry import find
from tasks.workflows import TYPE, StageInput, functions, stage
from tests.outbox import ledger as outbox_ledger
from tests.outbox.ledger import move
from tests.outbox.publishers.http_cases import Exchange
from tests.servers import ServersOfTests
from tests.tasks.deliveries import delivered, handled, scalar, submitted
from tests.tasks.work import task, transitions
from tests.tasks.workflows.conftest import Configure, configure_for
from tests.tasks.workflows.flows import (
    ASK,
    CUSTOMER,
    FETCH,
    FLOW,
    ID,
    KEYS,
    SUMMARY,
    flow,
    ran,
    steps,
    store_calls,
    stored,
)  # fmt: skip
from tests.tasks.workflows.outside import API_KEY, CHAT, KEY, SECRET, Outside, answering, said


def test_the_output_of_each_stage_reaches_the_next_and_the_last_one_is_the_result(outside: Outside) -> None:
    done = ran(FLOW)
    assert (done["status"], done["error_message"]) == ("SUCCEEDED", None)
    result = done["result"]
    assert (result["workflowId"], result["output"]) == (ID, {"stored": SUMMARY, "for": {"number": 17}})
    assert [(each["name"], each["kind"], each["attempt"]) for each in result["stages"]] == [
        ("fetch", "http", 1),
        ("summarize", "llm", 1),
        ("store", "python", 1),
    ]
    assert all(0 <= each["seconds"] < 60 for each in result["stages"])
    assert (result["stages"][0]["httpStatus"], result["stages"][1]["model"]) == (200, "small-2")
    assert result["stages"][1]["usage"] == {"prompt_tokens": 7, "completion_tokens": 5}
    kept = steps(done["id"])
    assert {name: each["output"] for name, each in kept.items()} == {
        "fetch": CUSTOMER,
        "summarize": SUMMARY,
        "store": result["output"],
    }
    assert outside.calls == dict.fromkeys(KEYS[:2], 1)
    assert (stored(), store_calls()) == ([(KEYS[2], SUMMARY)], {KEYS[2]: 1})


def test_a_request_carries_a_key_and_a_signature_that_others_can_check(outside: Outside) -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    ran(FLOW, context={"traceparent": trace})
    (request,) = outside.to("/crm")
    timestamp = request.headers["Celeriac-Timestamp"]
    signed = f"{KEYS[0]}.{timestamp}.".encode() + request.body
    assert request.headers[KEY] == KEYS[0]
    assert request.headers["Celeriac-Signature"] == f"v1={hmac.digest(SECRET.encode(), signed, hashlib.sha256).hex()}"
    assert request.headers["traceparent"] == trace
    assert json.loads(request.body) == {"order": {"number": 17}}


def test_without_a_body_a_destination_is_told_everything(outside: Outside) -> None:
    done = ran(flow({"name": "fetch", "kind": "http", "destination": "crm"}, input=[1], workflowId=ID))
    assert done["result"]["output"]["asked"] == {"workflowId": ID, "stage": "fetch", "input": [1], "outputs": {}}


def test_without_a_workflow_id_the_task_is_the_workflow(outside: Outside) -> None:
    done = ran(flow(FETCH, input=1))
    assert done["result"]["workflowId"] == str(done["id"])
    assert outside.calls == {f"{done['id']}:fetch": 1}


def test_the_same_workflow_id_of_two_principals_is_two_workflows(outside: Outside) -> None:
    for name in ("ada", "bob"):
        ran(flow(FETCH, input=name, workflowId=ID), context={"principal": name})
    assert set(outside.effects) == {f"ada:{ID}:fetch", f"bob:{ID}:fetch"}


def test_a_model_is_asked_as_its_api_wants_it(outside: Outside) -> None:
    messages = [{"role": "system", "content": "Be brief about {{input}}."}, {"role": "user", "content": "{input}!"}]
    options = {"temperature": 0, "max_tokens": 9}
    done = ran(flow({"name": "ask", "kind": "llm", "model": "m", "messages": messages, "options": options}, input="Hi"))
    (request,) = outside.to(CHAT)
    assert request.headers["Authorization"] == f"Bearer {API_KEY}"
    asked = [{"role": "system", "content": "Be brief about {input}."}, {"role": "user", "content": "Hi!"}]
    assert json.loads(request.body) == {"model": "m", "messages": asked, "temperature": 0, "max_tokens": 9}
    assert done["result"]["output"] == "A summary of: Hi!"


JSON = {"Content_Type": "application/json"}
OUTPUTS: list[tuple[bytes, dict[str, str], Any]] = [
    (b"plain \x00 text", {}, "plain \N{REPLACEMENT CHARACTER} text"),
    (b"gr\xfc\xdfe", {"Content_Type": "text/plain"}, "gr\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}e"),
    (b'{"a": 1}', {}, '{"a": 1}'),
    (b'[1, "x"]', {"Content_Type": "application/problem+json; charset=utf-8"}, [1, "x"]),
    (b" ", JSON, None),
]
FATAL: list[tuple[dict[str, Any], int, bytes, dict[str, str], str]] = [
    (FETCH, 404, b"no such order", {}, "answered 404: no such order"),
    (FETCH, 302, b"", {"Location": "http://169.254.169.254/"}, "redirects are not followed"),
    (FETCH, 200, b"{", JSON, "answered with what should be JSON. It is not JSON"),
    (FETCH, 200, b"[NaN]", JSON, "The output of the stage 'fetch' is not JSON"),
    (FETCH, 200, b'"\\u0000"', JSON, "The output of the stage 'fetch' has a NUL"),
    (FETCH, 200, b"x" * 300_000, {}, "has 300,002 bytes, and 262,144 is the most"),
    (FETCH, 200, b"x" * 1_100_000, {}, "answered with more than 1,048,576 bytes"),
    (ASK, 401, API_KEY.encode(), {}, "answered 401: …"),
    (ASK, 200, b"<html>", {}, "is LLM_BASE_URL an OpenAI-compatible API?"),
    (ASK, 200, b"[]", {}, "answered, but with no message"),
    (ASK, 200, json.dumps(said(None)).encode(), {}, "answered, but with no message"),
]
PASSING: list[tuple[int, bytes, dict[str, str], int]] = [
    (503, b"busy", {"Retry_After": "3"}, 60),
    (429, b"slower", {"Retry_After": "900"}, 900),
    (408, b"", {}, 60),
]


def test_an_answer_is_json_if_it_says_so_and_otherwise_text(outside: Outside) -> None:
    for body, headers, output in OUTPUTS:
        with outside.behaving(answering(200, body, **headers)):
            done = ran(flow(FETCH))
        assert (done["status"], done["result"]["output"]) == ("SUCCEEDED", output)


def test_what_will_never_work_is_dead_at_once(outside: Outside) -> None:
    for asked, status, body, headers, sentence in FATAL:
        with outside.behaving(answering(status, body, **headers)):
            done = ran(flow(asked))
        assert (done["status"], done["attempt_count"], done["error_code"]) == ("DEAD", 1, "permanent"), sentence
        assert sentence in done["error_message"]


def test_what_may_work_later_is_tried_again_no_sooner_than_it_was_asked_for(outside: Outside) -> None:
    for status, body, headers, wait_seconds in PASSING:
        with outside.behaving(answering(status, body, **headers)):
            done = ran(flow(FETCH))
        assert (done["status"], done["attempt_count"]) == ("RETRYING", 1)
        assert f"answered {status}: {body.decode() or 'without a word'}" in done["error_message"]
        assert done["next_retry_at"] - done["updated_at"] == timedelta(seconds=wait_seconds)


def test_an_answer_that_does_not_come_or_breaks_off_is_tried_again(outside: Outside) -> None:
    with outside.behaving(Exchange.hang):
        done = ran(flow({**FETCH, "timeoutSeconds": 0.1}))
    assert (done["status"], done["error_code"]) == ("RETRYING", "handler_error")
    assert "does not answer: nothing within 0.1 s" in done["error_message"]
    half = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"half'
    with outside.behaving(lambda exchange: exchange.say(half)):
        done = ran(flow(FETCH))
    assert (done["status"], "its answer broke off" in done["error_message"]) == ("RETRYING", True)


def test_sixty_seconds_then_three_hundred_then_dead_and_a_requeue_goes_on_after_what_is_done(
    outside: Outside, configure: Configure, stack: ServersOfTests
) -> None:
    """A language model that nobody runs: the port is closed."""
    configure(LLM_BASE_URL="http://127.0.0.1:1/v1")
    (id_,) = submitted(1, TYPE, FLOW)
    for attempt, wait_seconds in enumerate((60, 300), start=1):
        delivered([id_])
        found = task(id_)
        assert (found["status"], found["attempt_count"]) == ("RETRYING", attempt)
        assert found["next_retry_at"] - found["updated_at"] == timedelta(seconds=wait_seconds)
        assert "http://127.0.0.1:1 does not answer: no connection" in found["error_message"]
        move(stack, wait_seconds - 1)
        delivered([id_])
        assert task(id_)["attempt_count"] == attempt  # it was not due
        move(stack, 1)
    delivered([id_])
    assert (task(id_)["status"], task(id_)["attempt_count"]) == ("DEAD", 3)
    assert list(steps(id_)) == ["fetch"]

    configure_for(configure, outside.port)
    list(dead_letters.requeue(engine(), dead_letters.Choice(ids=[id_]), actor="me"))
    delivered([id_])
    assert task(id_)["status"] == "SUCCEEDED"
    assert task(id_)["result"]["output"]["stored"] == SUMMARY
    assert outside.calls == dict.fromkeys(KEYS[:2], 1)
    assert store_calls() == {KEYS[2]: 1}


def test_a_stage_says_in_which_attempt_it_was_done(outside: Outside, stack: ServersOfTests) -> None:
    (id_,) = submitted(1, TYPE, FLOW)

    def no_model_today(exchange: Exchange) -> None:
        return exchange.answer(500) if exchange.request_.target == CHAT else outside.well(exchange)

    with outside.behaving(no_model_today):
        delivered([id_])
    move(stack, 60)
    delivered([id_])
    assert [each["attempt"] for each in task(id_)["result"]["stages"]] == [1, 2, 2]
    assert outside.calls == {KEYS[0]: 1, KEYS[1]: 2}


@pytest.mark.parametrize(
    ("error", "status", "attempts", "code"),
    [
        (Permanent("There is no contract."), "DEAD", 1, "permanent"),
        (ConnectionError("later"), "RETRYING", 1, "handler_error"),
        (Snooze(5), "RETRYING", 0, None),
    ],
)
def test_a_function_says_what_a_handler_may_say(
    outside: Outside, error: Exception, status: str, attempts: int, code: str | None
) -> None:
    @stage("test.raise")
    def raises(_given: StageInput) -> None:
        raise error

    done = ran(flow({"name": "a", "kind": "python", "function": "test.raise"}))
    del functions._registered["test.raise"]
    assert (done["status"], done["attempt_count"], done["error_code"]) == (status, attempts, code)


def test_an_output_that_cannot_be_kept_is_the_end_since_another_run_would_repeat_its_effect(outside: Outside) -> None:
    stage("test.set")(lambda _given: {1, 2})
    done = ran(flow({"name": "a", "kind": "python", "function": "test.set"}))
    del functions._registered["test.set"]
    assert (done["status"], done["error_code"]) == ("DEAD", "permanent")
    assert "The output of the stage 'a' is not JSON" in done["error_message"]


def test_a_function_that_this_worker_does_not_know_is_tried_again_by_a_newer_one(outside: Outside) -> None:
    done = ran(flow(FETCH, {"name": "a", "kind": "python", "function": "os.system"}))
    assert (done["status"], done["attempt_count"]) == ("RETRYING", 1)
    assert "There is no function 'os.system' for a stage." in done["error_message"]
    assert outside.requests == []  # all is looked at before anything is done


def test_a_bad_workflow_that_was_stored_all_the_same_is_dead_with_a_sentence(outside: Outside) -> None:
    for payload, sentence in [
        (None, "The workflow cannot be run"),
        (
            flow({**FETCH, "destination": "http://169.254.169.254/"}),
            "There is no destination 'http://169.254.169.254/'",
        ),
        (flow({**FETCH, "destination": "told"}), "'told' has no https:// address"),
    ]:
        done = ran(payload)
        assert (done["status"], done["error_code"]) == ("DEAD", "permanent")
        assert sentence in done["error_message"]


def test_without_a_language_model_the_sentence_names_the_setting(outside: Outside, configure: Configure) -> None:
    configure(LLM_BASE_URL="")
    done = ran(FLOW)
    assert (done["status"], outside.requests) == ("DEAD", [])
    assert "LLM_BASE_URL names none" in done["error_message"]


def test_a_destination_in_a_private_network_is_guarded_as_webhooks_are(outside: Outside, configure: Configure) -> None:
    configure({"crm": f"http://127.0.0.1:{outside.port}/crm?allow_http=1"})
    done = ran(flow(FETCH))
    assert (done["status"], outside.connections) == ("DEAD", 0)
    assert "is a private address (loopback)" in done["error_message"]


def test_the_key_of_the_model_is_in_no_step_no_error_and_no_log(
    outside: Outside, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    ran(flow(ASK))
    for status in (401, 500):
        repeating = answering(status, f"the key {API_KEY} and Bearer {API_KEY.upper()}".encode())
        with outside.behaving(repeating):
            ran(flow(ASK))
    rows = "SELECT string_agg(row_to_json(t)::text, ' ') FROM"
    told = [scalar(f"{rows} {table} t") for table in ("ingest_task", "ingest_task_transition", "task_step")]
    text = "".join([*told, caplog.text]).casefold()
    assert "the key … and bearer …" in text
    assert API_KEY not in text


def test_whoever_asked_to_be_notified_is_told_the_end(outside: Outside) -> None:
    well, bad = ran(FLOW, notify="told"), ran(None, notify="told")
    told = [payload for (payload,) in outbox_ledger.rows("payload", "destination = 'told'")]
    assert [(each["taskId"], each["type"], each["status"]) for each in told] == [
        (str(well["id"]), TYPE, "SUCCEEDED"),
        (str(bad["id"]), TYPE, "DEAD"),
    ]
    assert "The workflow cannot be run" in told[1]["errorMessage"]


def test_the_handler_is_as_the_seed_wants_it() -> None:
    handler = find(TYPE)
    assert (handler.max_attempts, handler.backoff, handler.transactional) == (3, (60, 300), False)


def test_a_stage_that_takes_too_long_ends_in_the_middle_of_its_request_and_leaves_nothing_open(
    outside: Outside, caplog: pytest.LogCaptureFixture
) -> None:
    with handled(TYPE, find(TYPE).function, transactional=False, batch=1, soft_limit_seconds=0.2):
        with outside.behaving(Exchange.hang):
            done = ran(flow(FETCH))
        assert (done["status"], done["error_code"]) == ("RETRYING", "timeout")
        again = ran(flow(FETCH))
    assert again["status"] == "SUCCEEDED"
    assert "asyncio" not in {record.name for record in caplog.records}


def test_a_task_discarded_meanwhile_begins_no_further_stage(outside: Outside) -> None:
    (id_,) = submitted(1, TYPE, FLOW)

    def taken(exchange: Exchange) -> None:
        with engine().begin() as connection:
            connection.exec_driver_sql("UPDATE ingest_task SET lease_token = gen_random_uuid()")
        outside.well(exchange)

    with outside.behaving(taken):
        delivered([id_])
    assert outside.calls == {KEYS[0]: 1}
    assert (steps(id_), store_calls()) == ({}, {})
    assert [to for _, to in transitions(id_)] == ["QUEUED", "RUNNING"]
