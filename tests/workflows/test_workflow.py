"""A workflow from payload to result: its steps, and what each failure leads to."""

from __future__ import annotations

from datetime import timedelta

import pytest

from models.engine import engine
from tasks import Permanent, Snooze
from tasks.operations import dead_tasks
from tests.outbox import ledger as outbox_ledger
from tests.outbox.ledger import move
from tests.outbox.publishers.http_cases import Exchange
from tests.servers import ServersOfTests
from tests.tasks.deliveries import delivered, submitted
from tests.tasks.work import task, transitions
from tests.workflows.conftest import Configure, configure_for
from tests.workflows.flows import (  # fmt: skip
    CUSTOMER,
    FETCH,
    FLOW,
    ID,
    KEYS,
    SUMMARY,
    count_store_calls,
    flow,
    read_steps,
    read_stored,
    run_workflow,
)
from tests.workflows.outside import CHAT, Outside
from workflows import TYPE, StageInput, functions, stage


def test_each_stage_gets_the_outputs_before_it_and_the_last_output_is_the_result(outside: Outside) -> None:
    done = run_workflow(FLOW)
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
    kept = read_steps(done["id"])
    assert {name: each["output"] for name, each in kept.items()} == {
        "fetch": CUSTOMER,
        "summarize": SUMMARY,
        "store": result["output"],
    }
    assert outside.calls == dict.fromkeys(KEYS[:2], 1)
    assert (read_stored(), count_store_calls()) == ([(KEYS[2], SUMMARY)], {KEYS[2]: 1})


def test_without_a_workflow_id_the_task_id_is_used(outside: Outside) -> None:
    done = run_workflow(flow(FETCH, input=1))
    assert done["result"]["workflowId"] == str(done["id"])
    assert outside.calls == {f"{done['id']}:fetch": 1}


def test_the_same_workflow_id_of_two_principals_means_two_workflows(outside: Outside) -> None:
    for name in ("ada", "bob"):
        run_workflow(flow(FETCH, input=name, workflowId=ID), context={"principal": name})
    assert set(outside.effects) == {f"ada:{ID}:fetch", f"bob:{ID}:fetch"}


def test_a_workflow_is_dead_at_its_third_failure_and_a_requeue_continues_after_the_finished_stages(
    outside: Outside, configure: Configure, stack: ServersOfTests
) -> None:
    configure(LLM_BASE_URL="http://127.0.0.1:1/v1")  # a closed port
    (id_,) = submitted(1, TYPE, FLOW)
    for attempt, wait_seconds in enumerate((60, 300), start=1):
        delivered([id_])
        found = task(id_)
        assert (found["status"], found["attempt_count"]) == ("RETRYING", attempt)
        assert found["next_retry_at"] - found["updated_at"] == timedelta(seconds=wait_seconds)
        assert "http://127.0.0.1:1 did not answer: no connection" in found["error_message"]
        move(stack, wait_seconds - 1)
        delivered([id_])
        assert task(id_)["attempt_count"] == attempt  # it was not due
        move(stack, 1)
    delivered([id_])
    assert (task(id_)["status"], task(id_)["attempt_count"]) == ("DEAD", 3)
    assert list(read_steps(id_)) == ["fetch"]

    configure_for(configure, outside.port)
    list(dead_tasks.requeue(engine(), dead_tasks.Choice(ids=[id_]), actor="me"))
    delivered([id_])
    assert task(id_)["status"] == "SUCCEEDED"
    assert task(id_)["result"]["output"]["stored"] == SUMMARY
    assert outside.calls == dict.fromkeys(KEYS[:2], 1)
    assert count_store_calls() == {KEYS[2]: 1}


def test_the_result_names_the_attempt_in_which_each_stage_finished(outside: Outside, stack: ServersOfTests) -> None:
    (id_,) = submitted(1, TYPE, FLOW)

    def fail_the_model(exchange: Exchange) -> None:
        return exchange.answer(500) if exchange.request_.target == CHAT else outside.answer_normally(exchange)

    with outside.behaving(fail_the_model):
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
def test_a_stage_function_may_raise_what_a_handler_may_raise(
    outside: Outside, error: Exception, status: str, attempts: int, code: str | None
) -> None:
    @stage("test.raise")
    def raises(_given: StageInput) -> None:
        raise error

    done = run_workflow(flow({"name": "a", "kind": "python", "function": "test.raise"}))
    del functions._registered["test.raise"]
    assert (done["status"], done["attempt_count"], done["error_code"]) == (status, attempts, code)


def test_an_output_that_cannot_be_stored_is_dead_because_a_retry_would_repeat_its_effect(outside: Outside) -> None:
    stage("test.set")(lambda _given: {1, 2})
    done = run_workflow(flow({"name": "a", "kind": "python", "function": "test.set"}))
    del functions._registered["test.set"]
    assert (done["status"], done["error_code"]) == ("DEAD", "permanent")
    assert "The output of the stage 'a' is not valid JSON" in done["error_message"]


def test_a_function_unknown_to_this_worker_is_retried_because_a_newer_worker_may_know_it(outside: Outside) -> None:
    done = run_workflow(flow(FETCH, {"name": "a", "kind": "python", "function": "os.system"}))
    assert (done["status"], done["attempt_count"]) == ("RETRYING", 1)
    assert "No stage function is named 'os.system'." in done["error_message"]
    assert outside.requests == []  # the whole workflow is checked before its first stage


def test_an_invalid_workflow_in_the_ledger_is_dead_with_a_message(outside: Outside) -> None:
    for payload, sentence in [
        (None, "The workflow is invalid"),
        (
            flow({**FETCH, "destination": "http://169.254.169.254/"}),
            "There is no destination 'http://169.254.169.254/'",
        ),
        (flow({**FETCH, "destination": "told"}), "'told' has no https:// address"),
    ]:
        done = run_workflow(payload)
        assert (done["status"], done["error_code"]) == ("DEAD", "permanent")
        assert sentence in done["error_message"]


def test_the_final_status_is_sent_to_the_destination_in_notify(outside: Outside) -> None:
    good, bad = run_workflow(FLOW, notify="told"), run_workflow(None, notify="told")
    sent = [payload for (payload,) in outbox_ledger.rows("payload", "destination = 'told'")]
    assert [(each["taskId"], each["type"], each["status"]) for each in sent] == [
        (str(good["id"]), TYPE, "SUCCEEDED"),
        (str(bad["id"]), TYPE, "DEAD"),
    ]
    assert "The workflow is invalid" in sent[1]["errorMessage"]


def test_a_task_that_has_lost_its_lease_begins_no_further_stage(outside: Outside) -> None:
    (id_,) = submitted(1, TYPE, FLOW)

    def take_lease(exchange: Exchange) -> None:
        with engine().begin() as connection:
            connection.exec_driver_sql("UPDATE celeriac.ingest_task SET lease_token = gen_random_uuid()")
        outside.answer_normally(exchange)

    with outside.behaving(take_lease):
        delivered([id_])
    assert outside.calls == {KEYS[0]: 1}
    assert (read_steps(id_), count_store_calls()) == ({}, {})
    assert [to for _, to in transitions(id_)] == ["QUEUED", "RUNNING"]
