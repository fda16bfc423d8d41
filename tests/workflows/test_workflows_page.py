"""docs/workflows.md is true: its example runs as it stands, its limits and waits are those of the code."""

from __future__ import annotations

import json
import re

from settings import ROOT
from tasks.core.registry import find
from tests.tasks.deliveries import delivered, submitted
from tests.tasks.work import task
from tests.workflows.conftest import Configure
from tests.workflows.flows import ran
from tests.workflows.outside import Outside
from workflows import TYPE, functions, payload, request, run

PAGE = (ROOT / "docs" / "workflows.md").read_text()


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return str(found)


def test_the_example_runs_as_it_stands(outside: Outside, configure: Configure) -> None:
    exec(compile(block("python"), "docs/workflows.md", "exec"), {})
    done = ran(json.loads(block("json")))
    del functions._registered["shorten"]
    assert (done["status"], done["result"]["output"]) == ("SUCCEEDED", {"short": "A summary of:"})
    assert set(done["result"]) == {"workflowId", "output", "stages"}
    told = re.search(r"`(\{\"workflowId\", \"output\".*?\})`", PAGE)
    assert told
    assert all(
        f'"{name}"' in told[1] for name in ("workflowId", "output", "stages", "name", "kind", "seconds", "attempt")
    )


def test_the_example_of_a_single_request_runs_as_it_stands(outside: Outside) -> None:
    (given,) = re.findall(r"submit http\.request '(.+)'", PAGE)
    (id_,) = submitted(1, "http.request", json.loads(given))
    delivered([id_])
    assert list(task(id_)["result"]) == ["eventId"]


def test_limits_and_waits_are_those_of_the_code() -> None:
    handler = find(TYPE)
    assert handler.backoff == (60, 300)
    assert "after 60 s, then 300 s" in PAGE
    assert f"{handler.soft_limit_seconds / 60:g} minutes in\none run" in PAGE
    assert f"{payload.MOST_STAGES} stages, {payload.TEXT_LIMIT:,} characters" in PAGE
    assert (request.ANSWER_LIMIT, run.OUTPUT_LIMIT) == (1 << 20, 256 << 10)
    assert "1 MiB in a request or an answer, 256 KiB in an output" in PAGE
    defaults = [payload.HttpStage.model_fields, payload.LlmStage.model_fields]
    waits = "`http` {:g}, `llm` {:g}, at most {:g}".format(
        *(fields["timeout_seconds"].default for fields in defaults), payload.LONGEST_SECONDS
    )
    assert waits in PAGE
