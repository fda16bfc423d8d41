"""submit, when somebody goes away or an envelope says more: nothing is left unsaid, and nothing is passed over."""

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
from tests.tasks.door import DIES, FLAKY, Done, manage, started, submitted


def unread(*arguments: str) -> Done:
    """Into a pipe whose reader has gone."""
    with started("submit", FLAKY, *arguments) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        err = running.stderr.read()
    return Done(running.returncode, "", err)


@pytest.mark.parametrize(
    ("options", "lines", "left"),
    [
        (["--json"], 2500, "1,000 lines are submitted, the lines after line 1,001 are not."),
        (["--json"], 3, "3 lines are submitted."),
        ([], 1500, "1,500 lines are submitted."),
    ],
    ids=["half-way", "all of a few", "all, without JSON"],
)
def test_whoever_is_not_read_any_more_says_which_lines_are_submitted(
    stack: ServersOfTests, tmp_path: Path, options: list[str], lines: int, left: str
) -> None:
    file = tmp_path / "payloads.jsonl"
    file.write_text("\n" + "1\n" * lines)
    stopped = unread(f"@{file}", "--lines", *options)
    assert stopped.code == 1
    assert stopped.err == f"manage.py: Nobody reads what is printed here: {left}\n"
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
    """The row of the task that was made of it."""
    done = manage("submit", "-", "--envelopes", "--json", *options, stdin=json.dumps(envelope).encode())
    assert done.code == 0, done.err
    return work.task(uuid.UUID(done.json["taskId"]))


@pytest.mark.usefixtures("_more_places")
def test_what_an_envelope_says_takes_effect_before_what_the_command_says() -> None:
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
        ({"type": FLAKY, "context": {"idempotencyKey": ""}}, "A key is text"),
    ],
    ids=str,
)
def test_an_envelope_of_which_something_would_be_passed_over_is_refused(
    stack: ServersOfTests, envelope: dict[str, Any], sentence: str
) -> None:
    for options in ([], ["--lines"]):
        refused = manage("submit", "-", "--envelopes", *options, stdin=json.dumps(envelope).encode())
        assert (refused.code, sentence in refused.err) == (2, True), refused.err
    assert work.rows() == []


@pytest.mark.usefixtures("_more_places")
def test_a_task_can_be_submitted_again_as_show_prints_it() -> None:
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
