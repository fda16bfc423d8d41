"""docs/workflows.md: its examples run as written, and its limits are those of the code."""

from __future__ import annotations

import json
import re

from settings import ROOT
from tasks.core.registry import find
from tests.tasks.deliveries import delivered, submitted
from tests.tasks.work import task
from tests.workflows.conftest import Configure
from tests.workflows.flows import run_workflow
from tests.workflows.outside import Outside
from workflows import TYPE, functions, payload, request, run

PAGE = (ROOT / "docs" / "workflows.md").read_text()


def read_block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return str(found)


def test_the_example_runs_as_written(outside: Outside, configure: Configure) -> None:
    exec(compile(read_block("python"), "docs/workflows.md", "exec"), {})
    done = run_workflow(json.loads(read_block("json")))
    del functions._registered["shorten"]
    assert (done["status"], done["result"]["output"]) == ("SUCCEEDED", {"short": "A summary of:"})
    assert set(done["result"]) == {"workflowId", "output", "stages"}
    shown = re.search(r"`(\{\"workflowId\", \"output\".*?\})`", PAGE)
    assert shown
    assert all(
        f'"{name}"' in shown[1] for name in ("workflowId", "output", "stages", "name", "kind", "seconds", "attempt")
    )


def test_the_example_of_a_single_request_runs_as_written(outside: Outside) -> None:
    (given,) = re.findall(r"submit http\.request '(.+)'", PAGE)
    (id_,) = submitted(1, "http.request", json.loads(given))
    delivered([id_])
    assert list(task(id_)["result"]) == ["eventId"]


def test_limits_and_backoff_match_the_code() -> None:
    text = " ".join(PAGE.split())
    handler = find(TYPE)
    assert handler.backoff == (60, 300)
    assert "after 60 s, then 300 s" in text
    assert f"{handler.soft_limit_seconds / 60:g} minutes per attempt" in text
    assert f"{payload.MAX_STAGES} stages, {payload.MAX_PROMPT:,} characters" in text
    assert (request.MAX_BYTES, run.MAX_OUTPUT_BYTES) == (1 << 20, 256 << 10)
    assert "1 MiB in a request or an answer, 256 KiB in an output" in text
    defaults = [payload.HttpStage.model_fields, payload.LlmStage.model_fields]
    timeouts = "`http` {:g}, `llm` {:g}, at most {:g}".format(
        *(fields["timeout_seconds"].default for fields in defaults), payload.MAX_SECONDS
    )
    assert timeouts in text
