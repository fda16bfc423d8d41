"""submit: a closed pipe is reported, and no field of an envelope is ignored."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import settings
from tests.servers import ServersOfTests
from tests.tasks import work
from tests.tasks.command_line import DIES, FLAKY, Done, manage, started, submitted


def submit_into_closed_pipe(*arguments: str) -> Done:
    with started("submit", FLAKY, *arguments) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        err = running.stderr.read()
    return Done(running.returncode, "", err)


@pytest.mark.parametrize(
    ("options", "lines", "left"),
    [
        (["--json"], 2500, "1,000 lines were submitted, the lines after line 1,001 were not."),
        (["--json"], 3, "3 lines were submitted."),
        ([], 1500, "1,500 lines were submitted."),
    ],
    ids=["half-way", "all of a few", "all, without JSON"],
)
def test_a_closed_pipe_does_not_hide_which_lines_were_submitted(
    stack: ServersOfTests, tmp_path: Path, options: list[str], lines: int, left: str
) -> None:
    file = tmp_path / "payloads.jsonl"
    file.write_text("\n" + "1\n" * lines)
    stopped = submit_into_closed_pipe(f"@{file}", "--lines", *options)
    assert stopped.code == 1
    assert stopped.err == f"manage.py: stdout was closed: {left}\n"
    assert f"{len(work.rows()):,} lines" in left


# envelopes

BESIDES = {"queue": "slow", "priority": 9, "partitionKey": "article 5", "notify": "crm"}
COLUMNS = ("queue", "priority", "partition_key", "notify")


@pytest.fixture
def _more_places(stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("INGEST_QUEUES", "ingest,slow")
    monkeypatch.setenv("OUTBOX_DESTINATIONS", json.dumps({"crm": "redis:crm", "shop": "redis:shop"}))
    settings.current.cache_clear()
    yield
    monkeypatch.undo()
    settings.current.cache_clear()


def of_envelope(envelope: dict[str, Any], *options: object) -> dict[str, Any]:
    """Submit the envelope and return the row of its task."""
    done = manage("submit", "-", "--envelopes", "--json", *options, stdin=json.dumps(envelope).encode())
    assert done.code == 0, done.err
    return work.task(uuid.UUID(done.json["taskId"]))


@pytest.mark.usefixtures("_more_places")
def test_an_envelope_overrides_the_options_of_the_command() -> None:
    options = ["--queue", "ingest", "--priority", 3, "--notify", "shop"]
    row = of_envelope({"type": FLAKY, **BESIDES}, *options)
    assert [row[name] for name in COLUMNS] == list(BESIDES.values())
    row = of_envelope({"type": FLAKY, "notify": None}, *options)
    assert [row[name] for name in COLUMNS] == ["ingest", 3, None, "shop"]
    row = of_envelope({"type": FLAKY, "runAt": "2100-01-01T00:00:00Z"}, "--run-at", "1h")
    assert row["next_retry_at"].year == 2100


@pytest.mark.parametrize(
    ("envelope", "sentence"),
    [
        ({"type": FLAKY, "paylod": {"fail": 1}, "queue": "ingest", "priority": 9}, "no field 'paylod'"),
        ({"type": FLAKY, "queue": "x"}, "no queue 'x'"),
        ({"type": FLAKY, "priority": 10}, "priority"),
        ({"type": FLAKY, "notify": ""}, "no destination ''"),
        ({"type": FLAKY, "context": {"idempotencyKey": ""}}, "An idempotency key must be text"),
    ],
    ids=str,
)
def test_an_envelope_with_an_unknown_or_invalid_field_is_refused(
    stack: ServersOfTests, envelope: dict[str, Any], sentence: str
) -> None:
    for options in ([], ["--lines"]):
        refused = manage("submit", "-", "--envelopes", *options, stdin=json.dumps(envelope).encode())
        assert (refused.code, sentence in refused.err) == (2, True), refused.err
    assert work.rows() == []


@pytest.mark.usefixtures("_more_places")
def test_the_json_of_show_can_be_submitted_again() -> None:
    options: dict[str, Any] = {
        "partition_key": "article 5",
        "queue": "slow",
        "priority": 7,
        "notify": "crm",
        "max_attempts": 3,
    }
    (task,) = submitted(DIES, context={"user": 7}, **options)
    again = of_envelope(manage("show", task, "--json").json)
    assert again["id"] != task
    same = ("type", "payload", "context", *options)
    assert {name: again[name] for name in same} == {name: work.task(task)[name] for name in same}
