"""What `http` and `llm` stages send, what they make of each answer, and what they never tell."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
from datetime import timedelta
from typing import Any

import pytest

from tasks.core.registry import find
from tests.outbox.publishers.http_cases import Exchange
from tests.tasks.deliveries import handled, scalar
from tests.workflows.conftest import Configure
from tests.workflows.flows import ASK, FETCH, FLOW, ID, KEYS, flow, ran  # fmt: skip
from tests.workflows.outside import API_KEY, CHAT, KEY, SECRET, Outside, answering, said
from workflows import TYPE


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


def test_a_base_address_may_end_with_a_slash_or_a_query(outside: Outside, configure: Configure) -> None:
    for base in ("/v1", "/v1/", "/v1/?api-version=2", "/v1?api-version=2"):
        configure(LLM_BASE_URL=f"http://127.0.0.1:{outside.port}{base}")
        with outside.behaving(answering(200, json.dumps(said("Hi")).encode())):
            assert ran(flow(ASK))["result"]["output"] == "Hi"
    assert [request.target for request in outside.requests] == [CHAT, CHAT, *[f"{CHAT}?api-version=2"] * 2]


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
