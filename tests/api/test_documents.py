"""Documents over HTTP: upload, follow the task, search."""

from __future__ import annotations

import uuid

import pytest
from fastapi.testclient import TestClient

import settings
from api.documents import UPLOAD
from api.tokens import Scope
from models.engine import engine
from tasks.execution.deliver import deliver
from tests.api.callers import Caller, Callers, expect_error, make_token
from tests.api.examples import examples
from tests.documents import ledger
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
    deliver(engine(), [id_])
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
        deliver(engine(), [made.json()["taskId"]])
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
    upload, follow, search, listing, delete = (each for each in examples() if "/knowledge/" in each.path)
    made = client.post(**upload.options(**variables))
    assert made.status_code == 202
    variables["TASK"] = made.json()["taskId"]
    deliver(engine(), [variables["TASK"]])
    assert client.get(**follow.options(**variables)).json()["status"] == "SUCCEEDED"
    assert client.get(**search.options(**variables)).json()["hits"]
    assert len(client.get(**listing.options(**variables)).json()["documents"]) == 1
    assert client.delete(**delete.options(**variables)).json() == {"deleted": ["README.md"]}


# principals

SEARCH = "/api/knowledge/search"
DOCUMENTS = "/api/knowledge/documents"


def upload_as(caller: Caller, text: bytes, name: str = "rules.txt") -> str:
    """Upload a document, run its task, and return the path of the task."""
    answer = caller.post(UPLOAD, files={"file": (name, text, "text/plain")})
    assert answer.status_code == 202
    deliver(engine(), [answer.json()["taskId"]])
    path: str = answer.headers["location"]
    assert caller.get(path).json()["status"] == "SUCCEEDED"
    return path


def names_listed(caller: Caller) -> list[str]:
    return [each["name"] for each in caller.get(DOCUMENTS).json()["documents"]]


@pytest.fixture
def alice(callers: Callers) -> Caller:
    return callers(Scope.DOCUMENTS_READ, Scope.DOCUMENTS_WRITE, name="alice")


@pytest.fixture
def mallory(callers: Callers) -> Caller:
    everything = [scope for scope in Scope if scope not in (Scope.TASKS_READ_ALL, Scope.OPERATE)]
    return callers(*everything, name="mallory")


def test_an_upload_does_not_replace_the_document_of_another_principal(alice: Caller, mallory: Caller) -> None:
    upload_as(alice, b"the lease of alice")
    upload_as(mallory, b"the lease of mallory")
    for caller, word in ((alice, "alice"), (mallory, "mallory")):
        (hit,) = caller.get(SEARCH, params={"q": "lease"}).json()["hits"]
        assert f"⟦lease⟧ of {word}" in hit["highlight"]


def test_a_document_of_another_principal_is_neither_found_nor_listed(alice: Caller, mallory: Caller) -> None:
    path = upload_as(alice, b"the lease of alice")
    assert mallory.get(SEARCH, params={"q": "lease"}).json() == {"hits": []}
    assert names_listed(mallory) == []
    assert names_listed(alice) == ["rules.txt"]
    expect_error(mallory.get(path), 404, "unknown_task")
    expect_error(mallory.get(path.replace("knowledge/", "")), 404, "unknown_task")


def test_a_document_of_another_principal_cannot_be_deleted(alice: Caller, mallory: Caller) -> None:
    upload_as(alice, b"the lease of alice")
    upload_as(mallory, b"mine", "mine.txt")
    unknown = mallory.delete(DOCUMENTS, params={"name": "absent.txt"})
    answer = mallory.delete(DOCUMENTS, params={"name": ["rules.txt", "mine.txt"]})
    message = expect_error(answer, 404, "unknown_document")
    assert message.replace("rules", "absent") == unknown.json()["error"]["message"]
    assert (names_listed(alice), names_listed(mallory)) == (["rules.txt"], ["mine.txt"])
    assert alice.delete(DOCUMENTS, params={"name": "rules.txt"}).json() == {"deleted": ["rules.txt"]}
    assert alice.get(SEARCH, params={"q": "lease"}).json() == {"hits": []}
    assert names_listed(alice) == []


def test_a_hand_made_task_cannot_read_the_document_of_another_principal(alice: Caller, mallory: Caller) -> None:
    answer = alice.post(UPLOAD, files={"file": ("rules.txt", TEXT, "text/plain")})
    payload = work.task(uuid.UUID(answer.json()["taskId"]))["payload"]
    forged = mallory.post("/api/tasks", json={"type": "document.ingest", "payload": payload})
    deliver(engine(), [forged.json()["taskId"]])
    seen = mallory.get(forged.headers["location"]).json()
    assert (seen["status"], seen["result"]) == ("DISCARDED", None)
    assert alice.get(SEARCH, params={"q": "lease"}).json() == {"hits": []}


def test_a_shared_document_is_found_by_all_and_changed_by_none(alice: Caller, mallory: Caller) -> None:
    ledger.add_searchable("the lease of everyone", "rules.txt")
    for caller in (alice, mallory):
        assert [hit["name"] for hit in caller.get(SEARCH, params={"q": "lease"}).json()["hits"]] == ["rules.txt"]
        (listed,) = caller.get(DOCUMENTS).json()["documents"]
        assert (listed["name"], listed["principal"]) == ("rules.txt", None)
        expect_error(caller.delete(DOCUMENTS, params={"name": "rules.txt"}), 404, "unknown_document")
    upload_as(mallory, b"another lease")
    (hit,) = alice.get(SEARCH, params={"q": "lease"}).json()["hits"]
    assert "of everyone" in hit["highlight"]


def test_documents_are_listed_page_by_page(alice: Caller) -> None:
    for number in range(3):
        alice.post(UPLOAD, files={"file": (f"{number}.txt", TEXT, "text/plain")})
    first = alice.get(DOCUMENTS, params={"limit": 2}).json()
    rest = alice.get(DOCUMENTS, params={"limit": 2, "before": first["before"]}).json()
    assert [each["name"] for each in first["documents"] + rest["documents"]] == ["2.txt", "1.txt", "0.txt"]
    assert rest["before"] is None
    assert "is not a cursor" in expect_error(alice.get(DOCUMENTS, params={"before": "yesterday"}), 400, "misuse")
    expect_error(alice.get(DOCUMENTS, params={"before": "x" * 101}), 400, "misuse")


def test_a_delete_without_a_name_deletes_nothing(alice: Caller) -> None:
    upload_as(alice, TEXT)
    expect_error(alice.delete(DOCUMENTS), 400, "misuse")
    for name in ("", "\x00", "x" * 10_000):
        assert len(expect_error(alice.delete(DOCUMENTS, params={"name": name}), 404, "unknown_document")) < 300
    assert names_listed(alice) == ["rules.txt"]
