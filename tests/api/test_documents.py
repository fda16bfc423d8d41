"""Documents over HTTP: upload, follow the task, search."""

from __future__ import annotations

import uuid

import pytest
from fastapi.testclient import TestClient

import settings
from api.documents import UPLOAD
from api.tokens import Scope
from models.engine import engine
from tasks.execution.deliver import ingest
from tests.api.callers import Caller, Callers, expect_error, make_token
from tests.api.examples import examples
from tests.tasks import work

FAILING = {
    "CHROMA_BASE_URL": "http://127.0.0.1:1",
    "INGEST_REDIS_MAX_ATTEMPTS": "2",
    "INGEST_REDIS_RETRY_BASE_BACKOFF_MS": "0",
    "INGEST_REDIS_RETRY_MAX_BACKOFF_MS": "0",
    "INGEST_REDIS_RECLAIM_IDLE_MS": "0",
}
TEXT = b"Every right to write is a lease with a fence.\n"


@pytest.fixture
def caller(callers: Callers) -> Caller:
    return callers(Scope.DOCUMENTS_READ, Scope.DOCUMENTS_WRITE)


def test_an_uploaded_document_can_be_followed_and_found(caller: Caller) -> None:
    answer = caller.post(UPLOAD, files={"file": ("rules.txt", TEXT, "text/plain")})
    assert answer.status_code == 202
    id_ = answer.json()["taskId"]
    assert answer.headers["location"] == f"/api/knowledge/tasks/{id_}"
    assert caller.get(answer.headers["location"]).json()["status"] == "QUEUED"
    ingest(engine(), [id_])
    assert caller.get(answer.headers["location"]).json()["status"] == "SUCCEEDED"
    hits = caller.get("/api/knowledge/search", params={"q": "lease"}).json()["hits"]
    assert [(hit["name"], hit["position"]) for hit in hits] == [("rules.txt", 0)]
    assert "⟦lease⟧" in hits[0]["highlight"]
    assert uuid.UUID(hits[0]["documentId"])
    assert hits[0]["rank"] > 0
    assert caller.get("/api/knowledge/search?q=absent").json() == {"hits": []}


def test_uploading_the_same_document_twice_makes_one_task(caller: Caller) -> None:
    answers = [caller.post(UPLOAD, files={"file": ("rules.txt", TEXT, "text/plain")}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [202, 200]
    assert len({answer.json()["taskId"] for answer in answers}) == 1


def test_a_document_that_keeps_failing_is_retried_then_dead(callers: Callers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the alias names of the settings."""
    for name, value in FAILING.items():
        monkeypatch.setenv(name, value)
    settings.current.cache_clear()
    caller = callers()
    made = caller.post(UPLOAD, files={"file": ("rules.txt", TEXT, "text/plain")})
    seen = []
    for _ in range(2):
        ingest(engine(), [made.json()["taskId"]])
        task = caller.get(made.headers["location"]).json()
        seen.append((task["status"], task["attemptCount"], task["retry"]["count"]))
    assert seen == [("RETRYING", 1, 1), ("DEAD", 2, 2)]
    assert "Chroma" in task["errorMessage"]
    history = caller.get(f"/api/tasks/{task['taskId']}/transitions").json()["transitions"]
    assert [each["toStatus"] for each in history] == ["QUEUED", "RUNNING", "RETRYING", "RUNNING", "DEAD"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"json": {"file": "x"}},
        {"data": {"file": "x"}},
        {"files": {"another": ("a.txt", TEXT)}},
        {"files": {"file": ("", TEXT)}},
        {"files": [("file", ("a.txt", TEXT)), ("file", ("b.txt", TEXT))]},
        {"content": b"--y--", "headers": {"Content-Type": "multipart/form-data; boundary=x"}},
        {"content": TEXT, "headers": {"Content-Type": "multipart/form-data"}},
    ],
    ids=str,
)
def test_a_body_that_is_not_exactly_one_file_is_rejected(caller: Caller, options: dict[str, object]) -> None:
    expect_error(caller.post(UPLOAD, **options), 400, "misuse")
    assert work.rows() == []


def test_a_task_of_another_type_is_not_found_among_documents(callers: Callers) -> None:
    caller = callers()
    id_ = caller.submit().json()["taskId"]
    for given in (id_, uuid.uuid4(), "no-id"):
        expect_error(caller.get(f"/api/knowledge/tasks/{given}"), 404, "unknown_task")


def test_no_search_text_can_break_the_query(caller: Caller) -> None:
    for words in ("'", "\\", "a & | ! ( )", "⟦", "<script>", "x" * 1000, "the \u0301", "\x00", "%", '"'):
        assert caller.get("/api/knowledge/search", params={"q": words}).json() == {"hits": []}


def test_the_documented_examples_work(client: TestClient) -> None:
    variables = {"TOKEN": make_token("ci", Scope.DOCUMENTS_READ, Scope.DOCUMENTS_WRITE)}
    upload, follow, search = (each for each in examples() if "/knowledge/" in each.path)
    made = client.post(**upload.options(**variables))
    assert made.status_code == 202
    variables["TASK"] = made.json()["taskId"]
    ingest(engine(), [variables["TASK"]])
    assert client.get(**follow.options(**variables)).json()["status"] == "SUCCEEDED"
    assert client.get(**search.options(**variables)).json()["hits"]
