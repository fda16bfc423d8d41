"""Invalid workflows are rejected with a clear message, and templates insert outputs and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tasks import Permanent
from tasks.core.registry import BadHandler
from tests.workflows.conftest import Configure
from tests.workflows.flows import ASK, FETCH, FLOW, STORE, flow
from workflows import BadWorkflow, check, stage
from workflows.payload import parse
from workflows.templates import check_size, count_names, fill, fill_text

CALL: dict[str, Any] = {"name": "a", "kind": "python", "function": "f"}


@pytest.mark.parametrize(
    ("payload", "sentence"),
    [
        (None, "it must be an object with `stages`"),
        ({}, "`stages` is required"),
        (flow(), "`stages`: list should have at least 1 item"),
        (flow(*({**CALL, "name": f"s{n}"} for n in range(51))), "`stages`: list should have at most 50 items"),
        (flow(CALL, steps=[]), "`steps`: extra inputs are not permitted"),
        (flow({**CALL, "name": "a b"}), "`stages.0.name`: use 1 to 100 letters, digits, _ and -"),
        (flow({**CALL, "name": "a\n"}), "`stages.0.name`: use 1 to 100 letters, digits, _ and -"),
        (flow(CALL, CALL), "the stage name 'a' occurs twice"),
        (flow({**CALL, "name": "input"}), "the stage name 'input' is reserved"),
        (flow({"name": "a", "kind": "shell"}), "`stages.0`: input tag 'shell' found using 'kind' does not match"),
        (flow({**CALL, "module": "os"}), "`stages.0.module`: extra inputs are not permitted"),
        (flow({**FETCH, "url": "http://h/"}), "`stages.0.url`: extra inputs are not permitted"),
        (
            flow({**FETCH, "timeoutSeconds": 301}),
            "`stages.0.timeoutSeconds`: input should be less than or equal to 300",
        ),
        (
            flow({**FETCH, "body": ["{later}"]}),
            "the stage 'fetch' uses {later}, but no earlier stage has that name",
        ),
        (flow({**ASK, "prompt": "About {ask}"}), "the stage 'ask' uses {ask}"),
        (
            flow({**ASK, "prompt": "x" * 100_001}),
            "`stages.0.prompt`: string should have at most 100000 characters",
        ),
        (flow({**ASK, "prompt": None}), "`stages.0`: give either `prompt` or `messages`"),
        (flow({**ASK, "messages": [{"role": "user", "content": "x"}]}), "either `prompt` or `messages`"),
        (flow({**ASK, "options": {"stream": True}}), "`stages.0.options`: 'stream' cannot be set here"),
        (flow(CALL, workflowId=""), "`workflowId`: use 1 to 200 printable ASCII characters"),
        (flow(CALL, workflowId="a\r\nX-Evil: 1"), "`workflowId`: use 1 to 200 printable ASCII characters"),
        (flow(CALL, workflowId="x" * 201), "`workflowId`: use 1 to 200 printable ASCII characters"),
    ],
)
def test_an_invalid_workflow_is_rejected_with_a_clear_message(payload: Any, sentence: str) -> None:
    with pytest.raises(BadWorkflow) as error:
        parse(payload)
    assert error.value.message.startswith("The workflow is invalid: ")
    assert sentence in error.value.message
    assert error.value.message.endswith(".")


def test_everything_that_a_workflow_names_must_exist(configure: Configure) -> None:
    configure({"old": "http://h/", "told": "redis-stream://h/0?stream=s"}, LLM_BASE_URL="")
    for asked, sentence in [
        (STORE | {"function": "os.system"}, "No stage function is named 'os.system'. Known: "),
        (FETCH, "There is no destination 'crm'"),
        (FETCH | {"destination": "told"}, "'told' has no https:// address"),
        (FETCH | {"destination": "old"}, "'old' cannot be used: The destination's address is http://"),
        (ASK, "The stage 'ask' needs a language model: set LLM_BASE_URL."),
    ]:
        with pytest.raises(BadWorkflow) as error:
            check(flow({**asked, "body": 1} if asked["kind"] == "http" else asked))
        assert sentence in error.value.message
    configure({"crm": "https://h/"}, LLM_BASE_URL="https://h/v1")
    assert [each.name for each in check(FLOW).stages] == ["fetch", "summarize", "store"]


def test_a_function_needs_one_argument_and_a_valid_name_to_be_registered() -> None:
    functions: dict[str, Callable[..., Any]] = {"a b": lambda _: 1, "none": lambda: 1, "two": lambda _a, _b: 1}
    for name, function in functions.items():
        with pytest.raises(BadHandler):
            stage(name)(function)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{a} and {b}", 'text {b} and {"n": 1}'),  # inserted text is not scanned again
        ("{{a}} {a}", "{a} text {b}"),
        ('{"json": {"x": "{a}"}}', '{"json": {"x": "text {b}"}}'),
        ("{a.__class__} {a[0]} {a!r} {} { a } {a:>9}", "{a.__class__} {a[0]} {a!r} {} { a } {a:>9}"),
        ("{{{a}}}", "{{a}}"),
    ],
)
def test_a_template_inserts_outputs_and_nothing_else(template: str, text: str) -> None:
    assert fill_text(template, {"a": "text {b}", "b": {"n": 1}}) == text


def test_a_text_that_is_only_a_name_becomes_the_output_itself() -> None:
    known = {"a": {"n": [1]}, "input": None}
    assert fill({"x": ["{a}", "{a}!", 7, "{input}", "{{a}}"]}, known) == {
        "x": [{"n": [1]}, '{"n": [1]}!', 7, None, "{a}"]
    }
    assert count_names({"x": ["{a}", "{{b}}", "{c} {d}"], "{e}": "{d}"}) == {"a": 1, "c": 1, "d": 2}


def test_a_short_text_cannot_grow_until_it_fills_the_memory() -> None:
    for many in ("{a}" * 5_000, ["{a}"] * 5_000):
        with pytest.raises(Permanent, match="have 1,310,720,000 characters"):
            check_size({"x": many}, {"a": "x" * 262_144})
