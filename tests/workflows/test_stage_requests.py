"""Requests of `http` and `llm` stages: what they send, how they interpret answers, and which secrets stay hidden."""

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
from tests.workflows.flows import ASK, FETCH, FLOW, ID, KEYS, flow, run_workflow  # fmt: skip
from tests.workflows.outside import API_KEY, CHAT, KEY, SECRET, Outside, answering, make_reply
from workflows import TYPE


def test_a_request_carries_a_key_and_a_valid_signature(outside: Outside) -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    run_workflow(FLOW, context={"traceparent": trace})
    (request,) = outside.requests_to("/crm")
    timestamp = request.headers["Celeriac-Timestamp"]
    signed = f"{KEYS[0]}.{timestamp}.".encode() + request.body
    assert request.headers[KEY] == KEYS[0]
    assert request.headers["Celeriac-Signature"] == f"v1={hmac.digest(SECRET.encode(), signed, hashlib.sha256).hex()}"
    assert request.headers["traceparent"] == trace
    assert json.loads(request.body) == {"order": {"number": 17}}


def test_a_stage_without_a_body_sends_input_and_outputs(outside: Outside) -> None:
    done = run_workflow(flow({"name": "fetch", "kind": "http", "destination": "crm"}, input=[1], workflowId=ID))
    assert done["result"]["output"]["asked"] == {"workflowId": ID, "stage": "fetch", "input": [1], "outputs": {}}


def test_a_model_is_called_in_the_format_of_its_api(outside: Outside) -> None:
    messages = [{"role": "system", "content": "Be brief about {{input}}."}, {"role": "user", "content": "{input}!"}]
    options = {"temperature": 0, "max_tokens": 9}
    done = run_workflow(
        flow({"name": "ask", "kind": "llm", "model": "m", "messages": messages, "options": options}, input="Hi")
    )
    (request,) = outside.requests_to(CHAT)
    assert request.headers["Authorization"] == f"Bearer {API_KEY}"
    sent = [{"role": "system", "content": "Be brief about {input}."}, {"role": "user", "content": "Hi!"}]
    assert json.loads(request.body) == {"model": "m", "messages": sent, "temperature": 0, "max_tokens": 9}
    assert done["result"]["output"] == "A summary of: Hi!"


JSON = {"Content_Type": "application/json"}
OUTPUTS: list[tuple[bytes, dict[str, str], Any]] = [
    (b"plain \x00 text", {}, "plain \N{REPLACEMENT CHARACTER} text"),
    (b"gr\xfc\xdfe", {"Content_Type": "text/plain"}, "gr\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}e"),
    (b'{"a": 1}', {}, '{"a": 1}'),
    (b'[1, "x"]', {"Content_Type": "application/problem+json; charset=utf-8"}, [1, "x"]),
    (b" ", JSON, None),
]
PERMANENT: list[tuple[dict[str, Any], int, bytes, dict[str, str], str]] = [
    (FETCH, 404, b"no such order", {}, "answered 404: no such order"),
    (FETCH, 302, b"", {"Location": "http://169.254.169.254/"}, "Redirects are not followed"),
    (FETCH, 200, b"{", JSON, "answered with invalid JSON: "),
    (FETCH, 200, b"[NaN]", JSON, "The output of the stage 'fetch' is not valid JSON"),
    (FETCH, 200, b'"\\u0000"', JSON, "The output of the stage 'fetch' contains a NUL"),
    (FETCH, 200, b"x" * 300_000, {}, "has 300,002 bytes; the limit is 262,144"),
    (FETCH, 200, b"x" * 1_100_000, {}, "answered with more than 1,048,576 bytes"),
    (ASK, 401, API_KEY.encode(), {}, "answered 401: …"),
    (ASK, 200, b"<html>", {}, "Is LLM_BASE_URL an OpenAI-compatible API?"),
    (ASK, 200, b"[]", {}, "answered without a message"),
    (ASK, 200, json.dumps(make_reply(None)).encode(), {}, "answered without a message"),
]
TABLES = ("ledger.ingest_task", "ledger.ingest_task_transition", "ledger.task_step")
TEMPORARY: list[tuple[int, bytes, dict[str, str], int]] = [
    (503, b"busy", {"Retry_After": "3"}, 60),
    (429, b"slower", {"Retry_After": "900"}, 900),
    (408, b"", {}, 60),
]


def test_an_answer_is_json_if_its_content_type_says_so_and_otherwise_text(outside: Outside) -> None:
    for body, headers, output in OUTPUTS:
        with outside.behaving(answering(200, body, **headers)):
            done = run_workflow(flow(FETCH))
        assert (done["status"], done["result"]["output"]) == ("SUCCEEDED", output)


def test_a_permanent_failure_is_dead_at_once(outside: Outside) -> None:
    for stage, status, body, headers, sentence in PERMANENT:
        with outside.behaving(answering(status, body, **headers)):
            done = run_workflow(flow(stage))
        assert (done["status"], done["attempt_count"], done["error_code"]) == ("DEAD", 1, "permanent"), sentence
        assert sentence in done["error_message"]


def test_a_temporary_failure_is_retried_not_before_retry_after(outside: Outside) -> None:
    for status, body, headers, wait_seconds in TEMPORARY:
        with outside.behaving(answering(status, body, **headers)):
            done = run_workflow(flow(FETCH))
        assert (done["status"], done["attempt_count"]) == ("RETRYING", 1)
        assert f"answered {status}: {body.decode() or '(empty body)'}" in done["error_message"]
        assert done["next_retry_at"] - done["updated_at"] == timedelta(seconds=wait_seconds)


def test_a_missing_or_incomplete_answer_is_retried(outside: Outside) -> None:
    with outside.behaving(Exchange.hang):
        done = run_workflow(flow({**FETCH, "timeoutSeconds": 0.1}))
    assert (done["status"], done["error_code"]) == ("RETRYING", "handler_error")
    assert "did not answer: no answer within 0.1 s (timeoutSeconds of the stage)." in done["error_message"]
    half = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"half'
    with outside.behaving(lambda exchange: exchange.say(half)):
        done = run_workflow(flow(FETCH))
    assert done["status"] == "RETRYING"
    assert "answered 200, but the answer is incomplete: the connection was lost." in done["error_message"]


def test_an_answer_that_takes_longer_than_its_stage_may_names_the_limit(outside: Outside) -> None:
    def hang_in_the_middle(exchange: Exchange) -> None:
        exchange.say(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
        exchange.hang()

    with outside.behaving(hang_in_the_middle):
        done = run_workflow(flow({**FETCH, "timeoutSeconds": 0.5}))
    assert done["status"] == "RETRYING"
    assert "incomplete: it was not complete within 0.5 s (timeoutSeconds of the stage)." in done["error_message"]


def test_a_missing_language_model_is_reported_with_the_setting(outside: Outside, configure: Configure) -> None:
    configure(LLM_BASE_URL="")
    done = run_workflow(FLOW)
    assert (done["status"], outside.requests) == ("DEAD", [])
    assert "set LLM_BASE_URL" in done["error_message"]


def test_a_destination_in_a_private_network_is_forbidden(outside: Outside, configure: Configure) -> None:
    configure({"crm": f"http://127.0.0.1:{outside.port}/crm?allow_http=1"})
    done = run_workflow(flow(FETCH))
    assert (done["status"], outside.connections) == ("DEAD", 0)
    assert "is a private address" in done["error_message"]


def test_the_api_key_of_the_model_appears_in_no_step_error_or_log(
    outside: Outside, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    run_workflow(flow(ASK))
    for status in (401, 500):
        repeating = answering(status, f"the key {API_KEY} and Bearer {API_KEY.upper()}".encode())
        with outside.behaving(repeating):
            run_workflow(flow(ASK))
    rows = "SELECT string_agg(row_to_json(t)::text, ' ') FROM"
    stored = [scalar(f"{rows} {table} t") for table in TABLES]
    text = "".join([*stored, caplog.text]).casefold()
    assert "the key … and bearer …" in text
    assert API_KEY not in text


def test_the_base_address_may_end_with_a_slash_or_a_query(outside: Outside, configure: Configure) -> None:
    for base in ("/v1", "/v1/", "/v1/?api-version=2", "/v1?api-version=2"):
        configure(LLM_BASE_URL=f"http://127.0.0.1:{outside.port}{base}")
        with outside.behaving(answering(200, json.dumps(make_reply("Hi")).encode())):
            assert run_workflow(flow(ASK))["result"]["output"] == "Hi"
    assert [request.target for request in outside.requests] == [CHAT, CHAT, *[f"{CHAT}?api-version=2"] * 2]


def test_the_time_limit_ends_a_request_and_leaves_no_connection_open(
    outside: Outside, caplog: pytest.LogCaptureFixture
) -> None:
    with handled(TYPE, find(TYPE).function, transactional=False, batch=1, soft_limit_seconds=0.2):
        with outside.behaving(Exchange.hang):
            done = run_workflow(flow(FETCH))
        assert (done["status"], done["error_code"]) == ("RETRYING", "timeout")
    again = run_workflow(flow(FETCH))
    assert again["status"] == "SUCCEEDED"
    assert "asyncio" not in {record.name for record in caplog.records}
