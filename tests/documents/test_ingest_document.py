"""document.ingest from the upload to the search: with real files, bad ones, late ones, and with Chroma or without."""

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
from documents.chunks import chunks
from models.engine import engine
from models.sql import sql
from tests.documents.chroma_server import ChromaServer, chroma_server
from tests.documents.files import SENTENCE, TEXT_STREAM, bomb, pdf, raw_pdf
from tests.documents.ledger import chunk_texts, document, found, names, uploaded
from tests.outbox.ledger import move
from tests.servers import ServersOfTests, wait_until
from tests.tasks.deliveries import at_commit, change, delivered, scalar, submitted, take_away
from tests.tasks.door import manage
from tests.tasks.work import rows, task, transitions

pytestmark = pytest.mark.usefixtures("stack")
NOBODY = str(uuid.UUID(int=1))
NOBODY_THERE = "http://127.0.0.1:65530"


@pytest.fixture
def chroma(stack: ServersOfTests, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChromaServer]:
    with chroma_server() as server:
        monkeypatch.setenv("CHROMA_BASE_URL", server.url)
        settings.current.cache_clear()
        yield server


def ingested(content: str | bytes, name: str = "a.txt", media_type: str | None = None) -> dict[str, Any]:
    """Its task, after it ran."""
    id_ = uploaded(content, name, media_type).task_id
    delivered([id_])
    return task(id_)


@contextmanager
def settled(**variables: str) -> Iterator[None]:
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
        ("a.pdf", pdf("First page.", "The needle is on page two."), "The ⟦needle⟧ is on page two", 2),
    ],
)
def test_a_file_of_each_kind_is_searchable_when_its_task_has_succeeded(
    name: str, content: str | bytes, highlight: str, pages: int | None
) -> None:
    done = ingested(content, name)
    assert (done["status"], done["error_message"]) == ("SUCCEEDED", None)
    (hit,) = found("needle")
    assert (hit.document_id, hit.name) == (document(name)["id"], name)
    assert highlight in hit.highlight
    expected = {"documentId": str(hit.document_id), "chunks": 1, "characters": len(chunk_texts(name)[0])}
    assert done["result"] == expected | ({"pages": pages} if pages else {})


def test_a_hundred_pages_are_all_searchable() -> None:
    done = ingested(pdf(*(f"Word{n} {SENTENCE * 20}" for n in range(100))), "long.pdf")
    assert done["result"]["pages"] == 100
    assert done["result"]["chunks"] == len(chunk_texts("long.pdf")) > 40
    for n in (0, 50, 99):
        assert names(f"Word{n}", limit=1) == ["long.pdf"]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("empty.txt", b"", "The file is empty."),
        ("blank.html", b"<script>x</script>", "There is no text in it."),
        ("binary.txt", b"\0\1\2", "It is not text"),
        ("broken.pdf", pdf("Hello.")[:200], "The PDF is broken"),
        ("locked.pdf", pdf("Hello.", password="secret"), "The PDF is encrypted"),
        ("bomb.pdf", raw_pdf(bomb(100 << 20)), "far more than it should"),
        ("pages.pdf", raw_pdf(TEXT_STREAM, filters=b"", kids=b"3 0 R " * 5001, count=5001), "5,001 pages"),
        ("archive.zip", b"PK", "not understood"),
    ],
)
def test_a_bad_file_is_dead_at_once_with_a_sentence_that_names_it(name: str, content: bytes, sentence: str) -> None:
    done = ingested(content, name)
    assert (done["status"], done["error_code"], done["attempt_count"]) == ("DEAD", "permanent", 1)
    assert sentence in done["error_message"]
    assert f"({name})" in done["error_message"]
    assert chunk_texts(name) == []


def test_a_bad_file_among_good_ones_costs_them_nothing() -> None:
    tasks = [uploaded(content, f"{n}.pdf").task_id for n, content in enumerate((pdf("one"), b"%PDF-", pdf("three")))]
    delivered(tasks)
    assert [task(id_)["status"] for id_ in tasks] == ["SUCCEEDED", "DEAD", "SUCCEEDED"]
    assert sorted(names("one or three")) == ["0.pdf", "2.pdf"]


def test_a_changed_file_replaces_its_chunks_and_a_bad_one_leaves_them() -> None:
    ingested("old words", "a.txt")
    assert ingested("new words", "a.txt")["status"] == "SUCCEEDED"
    assert (names("old"), names("new")) == ([], ["a.txt"])
    assert ingested("", "a.txt")["status"] == "DEAD"
    assert names("new") == ["a.txt"]


@pytest.mark.guarantee
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["in order", "the older one late"])
def test_of_two_uploads_of_one_name_the_last_is_searchable_whichever_runs_first(order: tuple[int, int]) -> None:
    tasks = [uploaded("old words").task_id, uploaded("new words").task_id]
    for place in order:
        delivered([tasks[place]])
    assert chunk_texts() == ["new words"]
    assert [task(id_)["status"] for id_ in tasks] == ["DISCARDED", "SUCCEEDED"]


@pytest.mark.guarantee
def test_an_older_one_that_has_read_its_file_before_the_newer_upload_writes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The newer one is uploaded and ingested while the older one is at work."""
    older = uploaded("old words").task_id

    def overtaken(text_: str) -> Any:
        monkeypatch.setattr(handler, "chunks", chunks)
        delivered([uploaded("new words").task_id])
        return chunks(text_)

    monkeypatch.setattr(handler, "chunks", overtaken)
    delivered([older])
    assert (chunk_texts(), task(older)["status"]) == (["new words"], "DISCARDED")


@pytest.mark.guarantee
def test_chunks_and_success_commit_together_or_not_at_all() -> None:
    """What is seen from outside at the moment before the commit is nothing; a lost lease leaves nothing."""
    id_ = uploaded("needle").task_id
    seen: list[tuple[str, list[str]]] = []

    def look(_connection: Any) -> None:
        if not seen or seen[-1][0] == "RUNNING":
            with engine().connect() as another:
                status = another.execute(
                    sql("SELECT status FROM ledger.ingest_task WHERE id = :id"), {"id": id_}
                ).scalar_one()
            seen.append((status, chunk_texts()))

    with at_commit(engine(), look):
        delivered([id_])
    assert {tuple(texts) for status, texts in seen if status != "SUCCEEDED"} == {()}
    assert (task(id_)["status"], chunk_texts()) == ("SUCCEEDED", ["needle"])


@pytest.mark.guarantee
def test_whoever_lost_its_lease_while_it_was_reading_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    id_ = uploaded("needle").task_id
    monkeypatch.setattr(handler, "chunks", lambda text_: (take_away(id_), chunks(text_))[1])
    delivered([id_])
    assert (task(id_)["status"], chunk_texts()) == ("RUNNING", [])


def test_a_task_delivered_twice_runs_once() -> None:
    id_ = uploaded("needle").task_id
    delivered([id_])
    delivered([id_])
    assert len(transitions(id_)) == 3


def test_a_payload_that_no_upload_wrote_is_dead_with_a_sentence() -> None:
    payloads: list[Any] = [None, {}, [], {"documentId": "x", "revision": 1}, {"documentId": NOBODY}]
    ids = submitted(len(payloads), store.TYPE, payloads.__getitem__)
    delivered(ids)
    for id_ in ids:
        assert (task(id_)["status"], task(id_)["error_code"]) == ("DEAD", "permanent")
        assert "documentId" in task(id_)["error_message"]


def test_a_document_that_was_deleted_meanwhile_is_no_failure() -> None:
    id_ = uploaded("text").task_id
    with engine().begin() as connection:
        connection.execute(sql("DELETE FROM ledger.document"))
    delivered([id_])
    assert task(id_)["status"] == "DISCARDED"


def test_a_newcomer_ingests_a_folder_and_searches_it() -> None:
    """A worker beside the command, as `make up` starts them."""

    def work() -> None:
        expected = len(list((settings.ROOT / "docs").glob("*.md")))
        wait_until(lambda: len(rows()) == expected, "all are uploaded")
        delivered([id_ for (id_,) in rows("id")])

    worker = threading.Thread(target=work)
    worker.start()
    done = manage("ingest", settings.ROOT / "docs", "--wait", "--json")
    worker.join(20)
    assert (done.code, set(done.json["statuses"])) == (0, {"SUCCEEDED"})
    hits = manage("search", "lease", "--json").json
    assert "internals.md" in {hit["name"] for hit in hits}
    assert all("⟦lease⟧" in hit["highlight"].lower() for hit in hits)


# Chroma


def test_chroma_gets_a_copy_of_each_chunk(chroma: ChromaServer) -> None:
    content = SENTENCE * 200
    assert ingested(content)["status"] == "SUCCEEDED"
    assert sorted(chroma.texts()) == sorted(chunk_texts())
    assert len(chunk_texts()) > 3


def test_chroma_holds_the_last_revision_alone(chroma: ChromaServer) -> None:
    ingested(SENTENCE * 200)
    ingested("short")
    assert chroma.texts() == ["short"]


def test_an_older_one_that_was_overtaken_takes_its_copy_back(chroma: ChromaServer) -> None:
    older = uploaded("old words").task_id

    def overtake(path: str) -> None:
        if path.endswith("/upsert"):
            chroma.before_answering = lambda _path: None
            delivered_elsewhere(uploaded("new words").task_id)

    def delivered_elsewhere(id_: uuid.UUID) -> None:
        thread = threading.Thread(target=delivered, args=([id_],))
        thread.start()
        thread.join(20)

    chroma.before_answering = overtake
    delivered([older])
    assert (chroma.texts(), chunk_texts()) == (["new words"], ["new words"])
    assert task(older)["status"] == "DISCARDED"


def test_one_that_was_killed_after_it_told_chroma_and_is_old_by_then_takes_its_copy_back(chroma: ChromaServer) -> None:
    older = uploaded("old words").task_id
    change(older, "next_retry_at = ledger.ledger_now() + interval '1 hour'")
    ingested("new words")
    with Chroma(chroma.url) as client:
        client.put(document()["id"], 1, "a.txt", chunks("old words"))
    change(older, "next_retry_at = NULL")
    delivered([older])
    assert chroma.texts() == ["new words"]


def test_a_chroma_that_refuses_is_tried_again_and_nothing_is_searchable_before(chroma: ChromaServer) -> None:
    chroma.answers_with = (503, "later")
    failed = ingested("needle")
    assert (failed["status"], failed["attempt_count"], failed["error_code"]) == ("RETRYING", 1, "handler_error")
    assert "answers 503: later" in failed["error_message"]
    assert chunk_texts() == []


def test_the_walk_of_the_specification_with_a_chroma_that_is_not_there(stack: ServersOfTests) -> None:
    """Section 5.1 of the first seed: RETRYING with one failure, then DEAD with two."""
    with settled(
        CHROMA_BASE_URL=NOBODY_THERE,
        INGEST_REDIS_MAX_ATTEMPTS="2",
        INGEST_REDIS_RETRY_BASE_BACKOFF_MS="0",
        INGEST_REDIS_RETRY_MAX_BACKOFF_MS="0",
        INGEST_REDIS_RECLAIM_IDLE_MS="0",
    ):
        first = ingested("needle")
        assert (first["status"], first["attempt_count"]) == ("RETRYING", 1)
        assert "Chroma at 127.0.0.1:65530 does not answer" in first["error_message"]
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
