"""A workflow from its payload to its result: what is kept of it, and what each failure leads to."""

from __future__ import annotations

from datetime import timedelta

import pytest

from models.engine import engine
from tasks import Permanent, Snooze
from tasks.core.registry import find
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
    flow,
    ran,
    steps,
    store_calls,
    stored,
)
from tests.workflows.outside import CHAT, Outside
from workflows import TYPE, StageInput, functions, stage


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


def test_without_a_workflow_id_the_task_is_the_workflow(outside: Outside) -> None:
    done = ran(flow(FETCH, input=1))
    assert done["result"]["workflowId"] == str(done["id"])
    assert outside.calls == {f"{done['id']}:fetch": 1}


def test_the_same_workflow_id_of_two_principals_is_two_workflows(outside: Outside) -> None:
    for name in ("ada", "bob"):
        ran(flow(FETCH, input=name, workflowId=ID), context={"principal": name})
    assert set(outside.effects) == {f"ada:{ID}:fetch", f"bob:{ID}:fetch"}


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
    list(dead_tasks.requeue(engine(), dead_tasks.Choice(ids=[id_]), actor="me"))
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


def test_a_task_discarded_meanwhile_begins_no_further_stage(outside: Outside) -> None:
    (id_,) = submitted(1, TYPE, FLOW)

    def taken(exchange: Exchange) -> None:
        with engine().begin() as connection:
            connection.exec_driver_sql("UPDATE celeriac.ingest_task SET lease_token = gen_random_uuid()")
        outside.well(exchange)

    with outside.behaving(taken):
        delivered([id_])
    assert outside.calls == {KEYS[0]: 1}
    assert (steps(id_), store_calls()) == ({}, {})
    assert [to for _, to in transitions(id_)] == ["QUEUED", "RUNNING"]
