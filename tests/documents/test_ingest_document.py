"""document.ingest, from the upload to the search: good, bad and outdated files, with and without Chroma."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import settings
from documents import handler, store
from documents.chroma import Chroma
from documents.chunks import split
from models.engine import engine
from models.sql import sql
from tests.documents.chroma_server import ChromaServer
from tests.documents.files import SENTENCE, TEXT_STREAM, make_bomb, make_pdf, make_raw_pdf
from tests.documents.ledger import read_chunks, read_document, run_tasks, search, search_names, upload
from tests.outbox.ledger import move
from tests.servers import ServersOfTests, wait_until
from tests.tasks.command_line import manage
from tests.tasks.deliveries import at_commit, change, delivered, scalar, submitted, take_away
from tests.tasks.work import rows, task, transitions

pytestmark = pytest.mark.usefixtures("stack")
UNKNOWN_ID = str(uuid.UUID(int=1))
UNUSED_ADDRESS = "http://127.0.0.1:65530"


def ingest(content: str | bytes, name: str = "a.txt", media_type: str | None = None) -> dict[str, Any]:
    """Upload a document, run its task and return the task."""
    id_ = upload(content, name, media_type).task_id
    delivered([id_])
    return task(id_)


@contextmanager
def changed_settings(**variables: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as here:
        for name, value in variables.items():
            here.setenv(name, value)
        settings.current.cache_clear()
        yield
    settings.current.cache_clear()


@pytest.mark.parametrize(
    ("name", "content", "highlight", "pages"),
    [
        ("a.txt", "Grüße vom needle am Ende.", "⟦needle⟧", None),
        ("a.md", "# Title\n\nThe *needle* is here.", "*⟦needle⟧*", None),
        ("a.html", "<title>T</title><script>hay</script><p>The needle&amp;thread", "⟦needle⟧&thread", None),
        ("a.pdf", make_pdf("First page.", "The needle is on page two."), "The ⟦needle⟧ is on page two", 2),
    ],
)
def test_a_file_of_each_type_becomes_searchable(
    name: str, content: str | bytes, highlight: str, pages: int | None
) -> None:
    done = ingest(content, name)
    assert (done["status"], done["error_message"]) == ("SUCCEEDED", None)
    (hit,) = search("needle")
    assert (hit.document_id, hit.name) == (read_document(name)["id"], name)
    assert highlight in hit.highlight
    expected = {"documentId": str(hit.document_id), "chunks": 1, "characters": len(read_chunks(name)[0])}
    assert done["result"] == expected | ({"pages": pages} if pages else {})


@pytest.mark.parametrize(
    ("variable", "value", "name", "content", "sentence"),
    [
        ("DOCUMENT_MAX_PAGES", "1", "a.pdf", make_pdf("One.", "Two."), "The PDF has 2 pages; the limit is 1"),
        ("DOCUMENT_MAX_SECONDS", "1", "a.html", b"<!" * 1_000_000, "more than 1 s of processor time"),
        ("DOCUMENT_MAX_BYTES", "10", "a.txt", b"Hello, dear reader.", "more than 10 characters"),
    ],
    ids=["pages", "seconds", "characters"],
)
def test_a_document_beyond_a_limit_of_the_settings_is_dead_at_once(
    variable: str, value: str, name: str, content: bytes, sentence: str
) -> None:
    id_ = upload(content, name).task_id
    with changed_settings(**{variable: value}):
        delivered([id_])
    done = task(id_)
    assert (done["status"], done["error_code"]) == ("DEAD", "permanent")
    assert sentence in done["error_message"]


def test_a_hundred_pages_are_all_searchable() -> None:
    done = ingest(make_pdf(*(f"Word{n} {SENTENCE * 20}" for n in range(100))), "long.pdf")
    assert done["result"]["pages"] == 100
    assert done["result"]["chunks"] == len(read_chunks("long.pdf")) > 40
    for n in (0, 50, 99):
        assert search_names(f"Word{n}", limit=1) == ["long.pdf"]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("empty.txt", b"", "The file is empty."),
        ("blank.html", b"<script>x</script>", "The file has no text."),
        ("binary.txt", b"\0\1\2", "binary, not text"),
        ("broken.pdf", make_pdf("Hello.")[:200], "The PDF is broken"),
        ("locked.pdf", make_pdf("Hello.", password="secret"), "The PDF is encrypted"),
        ("bomb.pdf", make_raw_pdf(make_bomb(100 << 20)), "far too much data"),
        ("pages.pdf", make_raw_pdf(TEXT_STREAM, filters=b"", kids=b"3 0 R " * 5001, count=5001), "5,001 pages"),
        ("archive.zip", b"PK", "not supported"),
    ],
)
def test_a_bad_file_makes_its_task_dead_with_a_message_that_names_it(name: str, content: bytes, sentence: str) -> None:
    done = ingest(content, name)
    assert (done["status"], done["error_code"], done["attempt_count"]) == ("DEAD", "permanent", 1)
    assert sentence in done["error_message"]
    assert f"({name})" in done["error_message"]
    assert read_chunks(name) == []


def test_a_bad_file_does_not_affect_others_in_its_batch() -> None:
    contents = (make_pdf("one"), b"%PDF-", make_pdf("three"))
    tasks = [upload(content, f"{n}.pdf").task_id for n, content in enumerate(contents)]
    run_tasks(tasks)
    assert [task(id_)["status"] for id_ in tasks] == ["SUCCEEDED", "DEAD", "SUCCEEDED"]
    assert sorted(search_names("one or three")) == ["0.pdf", "2.pdf"]


def test_a_changed_file_replaces_its_chunks_and_a_bad_one_keeps_them() -> None:
    ingest("old words", "a.txt")
    assert ingest("new words", "a.txt")["status"] == "SUCCEEDED"
    assert (search_names("old"), search_names("new")) == ([], ["a.txt"])
    assert ingest("", "a.txt")["status"] == "DEAD"
    assert search_names("new") == ["a.txt"]


@pytest.mark.guarantee
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["in order", "older one last"])
def test_of_two_uploads_of_one_name_the_newer_is_searchable_in_whatever_order_they_run(order: tuple[int, int]) -> None:
    tasks = [upload("old words").task_id, upload("new words").task_id]
    for place in order:
        delivered([tasks[place]])
    assert read_chunks() == ["new words"]
    assert [task(id_)["status"] for id_ in tasks] == ["DISCARDED", "SUCCEEDED"]


@pytest.mark.guarantee
def test_a_task_that_is_overtaken_while_it_runs_writes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    older = upload("old words").task_id

    def upload_newer_then_split(text: str) -> Any:
        monkeypatch.setattr(handler, "split", split)
        delivered([upload("new words").task_id])
        return split(text)

    monkeypatch.setattr(handler, "split", upload_newer_then_split)
    delivered([older])
    assert (read_chunks(), task(older)["status"]) == (["new words"], "DISCARDED")


@pytest.mark.guarantee
def test_chunks_and_success_commit_together_or_not_at_all() -> None:
    """Another connection sees no chunk before the commit."""
    id_ = upload("needle").task_id
    seen: list[tuple[str, list[str]]] = []

    def look(_connection: Any) -> None:
        if not seen or seen[-1][0] == "RUNNING":
            with engine().connect() as another:
                status = another.execute(
                    sql("SELECT status FROM ledger.ingest_task WHERE id = :id"), {"id": id_}
                ).scalar_one()
            seen.append((status, read_chunks()))

    with at_commit(engine(), look):
        delivered([id_])
    assert {tuple(texts) for status, texts in seen if status != "SUCCEEDED"} == {()}
    assert (task(id_)["status"], read_chunks()) == ("SUCCEEDED", ["needle"])


@pytest.mark.guarantee
def test_a_task_that_loses_its_lease_while_it_reads_the_file_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    id_ = upload("needle").task_id
    monkeypatch.setattr(handler, "split", lambda text: (take_away(id_), split(text))[1])
    delivered([id_])
    assert (task(id_)["status"], read_chunks()) == ("RUNNING", [])


def test_a_task_delivered_twice_runs_once() -> None:
    id_ = upload("needle").task_id
    delivered([id_])
    delivered([id_])
    assert len(transitions(id_)) == 3


def test_an_invalid_payload_makes_its_task_dead() -> None:
    payloads: list[Any] = [None, {}, [], {"documentId": "x", "revision": 1}, {"documentId": UNKNOWN_ID}]
    ids = submitted(len(payloads), store.TYPE, payloads.__getitem__)
    run_tasks(ids)
    for id_ in ids:
        assert (task(id_)["status"], task(id_)["error_code"]) == ("DEAD", "permanent")
        assert "documentId" in task(id_)["error_message"]


def test_a_folder_is_added_and_searched() -> None:

    def work() -> None:
        expected = len(list((settings.ROOT / "docs").glob("*.md")))
        wait_until(lambda: len(rows()) == expected, "all files are uploaded")
        run_tasks([id_ for (id_,) in rows("id")])

    worker = threading.Thread(target=work)
    worker.start()
    done = manage("documents", "add", settings.ROOT / "docs", "--wait", "--json")
    worker.join(20)
    assert (done.code, set(done.json["statuses"])) == (0, {"SUCCEEDED"})
    hits = manage("documents", "search", '"presumed a duplicate"', "--json").json
    assert "internals.md" in {hit["name"] for hit in hits}
    assert all("⟦presumed⟧" in hit["highlight"].lower() for hit in hits)


# Chroma


def test_chroma_gets_a_copy_of_each_chunk(chroma: ChromaServer) -> None:
    content = SENTENCE * 200
    assert ingest(content)["status"] == "SUCCEEDED"
    assert sorted(chroma.texts()) == sorted(read_chunks())
    assert len(read_chunks()) > 3


def test_chroma_has_only_the_current_revision(chroma: ChromaServer) -> None:
    ingest(SENTENCE * 200)
    ingest("short")
    assert chroma.texts() == ["short"]


def test_a_task_that_is_overtaken_deletes_its_copy_in_chroma(chroma: ChromaServer) -> None:
    older = upload("old words").task_id

    def overtake(path: str) -> None:
        if path.endswith("/upsert"):
            chroma.before_answering = lambda _path: None
            delivered_elsewhere(upload("new words").task_id)

    def delivered_elsewhere(id_: uuid.UUID) -> None:
        thread = threading.Thread(target=delivered, args=([id_],))
        thread.start()
        thread.join(20)

    chroma.before_answering = overtake
    delivered([older])
    assert (chroma.texts(), read_chunks()) == (["new words"], ["new words"])
    assert task(older)["status"] == "DISCARDED"


def test_the_copy_of_a_killed_attempt_is_deleted_when_its_revision_is_outdated(chroma: ChromaServer) -> None:
    older = upload("old words").task_id
    change(older, "next_retry_at = ledger.ledger_now() + interval '1 hour'")
    ingest("new words")
    with Chroma(chroma.url) as client:
        client.put(read_document()["id"], 1, "a.txt", split("old words"))
    change(older, "next_retry_at = NULL")
    delivered([older])
    assert chroma.texts() == ["new words"]


def test_an_error_of_chroma_is_retried_and_nothing_is_searchable_before(chroma: ChromaServer) -> None:
    chroma.answers_with = (503, "later")
    failed = ingest("needle")
    assert (failed["status"], failed["attempt_count"], failed["error_code"]) == ("RETRYING", 1, "handler_error")
    assert "answered 503: later" in failed["error_message"]
    assert read_chunks() == []


def test_an_unreachable_chroma_is_retried_until_the_task_is_dead(stack: ServersOfTests) -> None:
    with changed_settings(
        CHROMA_BASE_URL=UNUSED_ADDRESS,
        INGEST_REDIS_MAX_ATTEMPTS="2",
        INGEST_REDIS_RETRY_BASE_BACKOFF_MS="0",
        INGEST_REDIS_RETRY_MAX_BACKOFF_MS="0",
        INGEST_REDIS_RECLAIM_IDLE_MS="0",
    ):
        first = ingest("needle")
        assert (first["status"], first["attempt_count"]) == ("RETRYING", 1)
        assert "Chroma at 127.0.0.1:65530 is unreachable" in first["error_message"]
        move(stack, 1)
        delivered([first["id"]])
    last = task(first["id"])
    assert (last["status"], last["attempt_count"]) == ("DEAD", 2)
    assert transitions(first["id"]) == [
        (None, "QUEUED"),
        ("QUEUED", "RUNNING"),
        ("RUNNING", "RETRYING"),
        ("RETRYING", "RUNNING"),
        ("RUNNING", "DEAD"),
    ]
    assert scalar("SELECT count(*) FROM ledger.document_chunk") == 0
