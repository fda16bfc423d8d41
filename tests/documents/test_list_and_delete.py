"""Listing and deleting documents, their chunks and their copies in Chroma, while tasks are working on them."""

from __future__ import annotations

import threading
import uuid
from typing import Any

import pytest

import documents
from documents import UnknownDocument, handler, store
from documents.chroma import Chroma, ChromaFailed
from documents.chunks import split
from models.engine import sessions
from models.sql import sql
from tasks import Discard
from tests.documents.chroma_server import ChromaServer
from tests.documents.ledger import add_searchable, read_document, search_names, upload
from tests.servers import wait_until
from tests.tasks.deliveries import change, delivered, scalar, wait_until_blocked
from tests.tasks.work import task

pytestmark = pytest.mark.usefixtures("stack")


def delete(*names: str) -> list[str]:
    with sessions().begin() as session:
        return documents.delete(session, names)


def count(table: str) -> int:
    return int(scalar(f"SELECT count(*) FROM ledger.{table}"))


def test_a_deleted_document_and_its_chunks_are_gone_and_others_stay() -> None:
    for name in ("a.txt", "b.txt", "c.txt"):
        add_searchable("needle", name)
    assert sorted(delete("a.txt", "b.txt", "a.txt")) == ["a.txt", "b.txt"]
    assert search_names("needle") == ["c.txt"]
    assert (count("document"), count("document_chunk")) == (1, 1)


def test_an_unknown_name_is_an_error_and_nothing_is_deleted() -> None:
    add_searchable("needle")
    for name in ("b.txt", "a\0b", "a\udc80b", "A.TXT"):
        with pytest.raises(UnknownDocument) as error:
            delete("a.txt", name)
        assert repr(name) in error.value.message
    assert search_names("needle") == ["a.txt"]


def test_a_deletion_that_is_rolled_back_deletes_nothing() -> None:
    add_searchable("needle")
    with sessions()() as session:
        documents.delete(session, ["a.txt"])
        session.rollback()
    assert search_names("needle") == ["a.txt"]


def test_a_file_that_is_added_again_after_its_deletion_is_ingested_again() -> None:
    first = upload("needle")
    delivered([first.task_id])
    delete("a.txt")
    again = upload("needle")
    assert (again.created, again.task_id != first.task_id) == (True, True)
    delivered([again.task_id])
    assert search_names("needle") == ["a.txt"]


@pytest.mark.guarantee
def test_a_queued_task_of_a_deleted_document_ends_discarded() -> None:
    id_ = upload("needle").task_id
    delete("a.txt")
    delivered([id_])
    assert (task(id_)["status"], task(id_)["attempt_count"], count("document_chunk")) == ("DISCARDED", 0, 0)


@pytest.mark.guarantee
def test_a_running_task_whose_document_is_deleted_ends_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    id_ = upload("needle").task_id
    monkeypatch.setattr(handler, "split", lambda text: (delete("a.txt"), split(text))[1])
    delivered([id_])
    assert (task(id_)["status"], task(id_)["attempt_count"], count("document_chunk")) == ("DISCARDED", 0, 0)


@pytest.mark.guarantee
def test_a_task_that_waits_for_a_deletion_writes_no_chunk() -> None:
    id_ = add_searchable("needle")
    discarded: list[Exception] = []

    def write() -> None:
        try:
            store.replace_chunks(writer, id_, 1, split("needle, late"))
        except Discard as discard:
            discarded.append(discard)

    with sessions()() as writer, sessions()() as deleting:  # if a check fails, this frees the thread first
        documents.delete(deleting, ["a.txt"])
        pid = writer.execute(sql("SELECT pg_backend_pid()")).scalar_one()
        thread = threading.Thread(target=write)
        thread.start()
        wait_until_blocked(pid)
        deleting.commit()
        thread.join(20)
        writer.rollback()
    assert (len(discarded), count("document_chunk")) == (1, 0)


def test_copies_in_chroma_are_deleted_too(chroma: ChromaServer) -> None:
    for name in ("a.txt", "b.txt"):
        delivered([upload(f"needle in {name}", name).task_id])
    delete("a.txt")
    assert chroma.texts() == ["needle in b.txt"]


def test_if_chroma_fails_nothing_is_deleted_so_that_the_deletion_can_be_repeated(chroma: ChromaServer) -> None:
    add_searchable("needle")
    chroma.answers_with = (503, "later")
    with pytest.raises(ChromaFailed, match="answered 503: later"):
        delete("a.txt")
    assert search_names("needle") == ["a.txt"]
    chroma.answers_with = None
    assert delete("a.txt") == ["a.txt"]


@pytest.mark.guarantee
def test_a_copy_made_while_the_deletion_was_not_committed_is_deleted_by_its_task(chroma: ChromaServer) -> None:
    """The task copies its chunks after the deletion has cleared Chroma and before it commits."""
    id_ = upload("needle").task_id
    session = sessions()()
    documents.delete(session, ["a.txt"])
    copied = threading.Event()
    chroma.before_answering = lambda path: copied.set() if path.endswith("/upsert") else None
    thread = threading.Thread(target=delivered, args=([id_],))
    thread.start()
    assert copied.wait(20)
    wait_until(lambda: scalar("SELECT count(*) FROM pg_locks WHERE NOT granted") > 0, "the task waits for a lock")
    session.commit()
    session.close()
    thread.join(20)
    assert (chroma.texts(), task(id_)["status"]) == (["needle"], "RETRYING")
    delivered([id_])
    assert (chroma.texts(), task(id_)["status"], task(id_)["attempt_count"]) == ([], "DISCARDED", 0)


def test_the_copy_of_a_killed_attempt_is_deleted_by_the_next_one(chroma: ChromaServer) -> None:
    id_ = upload("needle").task_id
    document_id: uuid.UUID = read_document()["id"]
    delete("a.txt")
    with Chroma(chroma.url) as client:
        client.put(document_id, 1, "a.txt", split("needle"))
    change(id_, "attempt_count = 1")
    delivered([id_])
    assert (chroma.texts(), task(id_)["status"]) == ([], "DISCARDED")


def test_documents_are_listed_page_by_page_newest_change_first() -> None:
    for name in ("a.txt", "b.txt", "c.txt"):
        upload(f"text of {name}", name)
    add_searchable("changed", "a.txt")
    listed: list[Any] = []
    before = None
    while page := list_page(before, limit=2):
        listed += page
        before = (page[-1].updated_at, page[-1].document_id)
    assert [(each.name, each.revision, each.size_bytes, each.chunks, each.status) for each in listed] == [
        ("a.txt", 2, 7, 1, "QUEUED"),
        ("c.txt", 1, 13, 0, "QUEUED"),
        ("b.txt", 1, 13, 0, "QUEUED"),
    ]
    assert {each.media_type for each in listed} == {"text/plain"}


def test_a_document_whose_task_was_pruned_is_listed_without_a_status() -> None:
    add_searchable("needle")
    with sessions().begin() as session:
        session.execute(sql("DELETE FROM ledger.ingest_task_transition"))
        session.execute(sql("DELETE FROM ledger.ingest_task"))
    (listed,) = list_page(None, limit=9)
    assert (listed.status, listed.chunks) == (None, 1)


def list_page(before: Any, *, limit: int) -> list[documents.ListedDocument]:
    with sessions()() as session:
        return documents.list_documents(session, before=before, limit=limit)
