"""Uploading: one row per name, one task per change, in the caller's transaction; and the row says what is current."""

from __future__ import annotations

import hashlib
import threading
import uuid

import pytest

import documents
import settings
from documents import BadDocumentName, DocumentTooLarge, store
from documents.chunks import chunks
from models.engine import engine, sessions
from models.sql import sql
from tasks import Discard
from tasks.operations.dead_tasks import Choice, discard
from tests.documents.ledger import chunk_texts, document, searchable, uploaded
from tests.tasks.deliveries import delivered, scalar, wait_until_blocked
from tests.tasks.work import rows, task

pytestmark = pytest.mark.usefixtures("stack")


def test_an_upload_is_a_document_and_a_task_that_carries_ids_only() -> None:
    made = uploaded("Hello reader.", "notes/a.md")
    row = document("notes/a.md")
    assert (made.created, made.status) == (True, "QUEUED")
    assert (bytes(row["content"]), row["media_type"], row["revision"]) == (b"Hello reader.", "text/markdown", 1)
    assert bytes(row["sha256"]) == hashlib.sha256(b"Hello reader.").digest()
    assert task(made.task_id)["payload"] == {"documentId": str(row["id"]), "revision": 1}


def test_an_upload_that_is_rolled_back_never_was() -> None:
    with sessions()() as session:
        documents.upload(session, name="a.txt", content=b"text")
        session.rollback()
    assert (rows(), scalar("SELECT count(*) FROM ledger.document")) == ([], 0)


def test_the_same_file_again_meets_the_same_task() -> None:
    first = uploaded("text")
    changed_at = document()["updated_at"]
    again = uploaded("text")
    assert (again.task_id, again.created) == (first.task_id, False)
    assert (document()["revision"], document()["updated_at"]) == (1, changed_at)


def test_another_name_is_another_document_with_the_same_content() -> None:
    assert uploaded("text", "a.txt").task_id != uploaded("text", "b.txt").task_id
    assert document("a.txt")["id"] != document("b.txt")["id"]


def test_a_file_that_changed_is_a_new_task_of_the_same_document_and_so_is_one_that_changed_back() -> None:
    id_ = (uploaded("one"), document()["id"])[1]
    tasks = [uploaded(content).task_id for content in ("one", "two", "one", "one")]
    assert len(set(tasks)) == 3
    assert tasks[2] == tasks[3]
    assert (document()["id"], document()["revision"], bytes(document()["content"])) == (id_, 3, b"one")


def test_the_same_bytes_said_to_be_something_else_are_read_anew() -> None:
    assert uploaded("<p>a", "a.txt").task_id != uploaded("<p>a", "a.txt", "text/html").task_id
    assert uploaded("<p>a", "a.txt", "TEXT/HTML").created is False


def test_a_task_that_was_discarded_is_begun_anew_and_one_that_died_is_not() -> None:
    first = uploaded("")
    delivered([first.task_id])
    assert (uploaded("").task_id, uploaded("").status) == (first.task_id, "DEAD")
    assert list(discard(engine(), Choice([first.task_id]), actor="somebody")) == [[first.task_id]]
    again = uploaded("")
    assert (again.created, again.task_id != first.task_id, document()["revision"]) == (True, True, 2)


def test_an_odd_name_is_a_name() -> None:
    odd = [
        "'; DROP TABLE document; --",
        "a\nb.txt",
        "%s %(x)s :x.txt",
        "名前 🌱.md",
        "[bold]x[/].txt",
        "../../x",
        "x" * 1000,
    ]
    for name in odd:
        assert uploaded("text", name).created
        assert document(name)["name"] == name


def test_what_cannot_be_a_name_is_refused() -> None:
    for name in ["", "  ", "a\0b", "a\udc80b", "x" * 1001, "é" * 501]:
        with pytest.raises(BadDocumentName):
            uploaded("text", name)
    assert rows() == []


def test_a_file_over_the_limit_is_refused_before_anything_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCUMENT_MAX_BYTES", "10")
    settings.current.cache_clear()
    with pytest.raises(DocumentTooLarge, match="11 bytes, and 10 is the most"):
        uploaded("x" * 11)
    assert uploaded("x" * 10).created
    assert DocumentTooLarge.http_status == 413


def test_two_uploads_of_one_name_wait_for_each_other_and_the_last_to_commit_is_current() -> None:
    with sessions()() as first, sessions()() as second:
        documents.upload(first, name="a.txt", content=b"one")
        pid = second.execute(sql("SELECT pg_backend_pid()")).scalar_one()
        thread = threading.Thread(target=documents.upload, args=(second,), kwargs={"name": "a.txt", "content": b"two"})
        thread.start()
        wait_until_blocked(pid)
        first.commit()
        thread.join(20)
        second.commit()
    assert (document()["revision"], bytes(document()["content"])) == (2, b"two")
    assert len(rows()) == 2


def test_chunks_are_replaced_as_a_whole() -> None:
    id_ = searchable("long " * 1000)
    assert len(chunk_texts()) > 3
    assert searchable("short") == id_
    assert chunk_texts() == ["short"]


@pytest.mark.guarantee
def test_an_old_revision_writes_nothing() -> None:
    id_ = searchable("new")
    with sessions().begin() as session:
        session.execute(sql("UPDATE ledger.document SET revision = 5"))
    for revision in (1, 4, 6):
        with pytest.raises(Discard), sessions().begin() as session:
            store.replace_chunks(session, id_, revision, chunks("old"))
    with pytest.raises(Discard), sessions().begin() as session:
        store.replace_chunks(session, uuid.uuid4(), 5, chunks("nobody's"))
    assert chunk_texts() == ["new"]


@pytest.mark.guarantee
def test_an_upload_that_commits_while_an_older_one_is_being_written_wins() -> None:
    """The older one waits for the upload, and then sees that it is old."""
    id_ = searchable("one")
    refused: list[Exception] = []

    def write_old() -> None:
        try:
            store.replace_chunks(older, id_, 1, chunks("one, late"))
        except Discard as discard:
            refused.append(discard)

    with sessions()() as newer, sessions()() as older:
        documents.upload(newer, name="a.txt", content=b"two")
        pid = older.execute(sql("SELECT pg_backend_pid()")).scalar_one()
        thread = threading.Thread(target=write_old)
        thread.start()
        wait_until_blocked(pid)
        newer.commit()
        thread.join(20)
        older.rollback()
    assert len(refused) == 1
    assert chunk_texts() == ["one"]


def test_an_upload_waits_until_chunks_that_are_being_written_are_committed() -> None:
    id_ = searchable("one")
    with sessions()() as writer, sessions()() as newer:
        store.replace_chunks(writer, id_, 1, chunks("one again"))
        pid = newer.execute(sql("SELECT pg_backend_pid()")).scalar_one()
        thread = threading.Thread(target=documents.upload, args=(newer,), kwargs={"name": "a.txt", "content": b"two"})
        thread.start()
        wait_until_blocked(pid)
        writer.commit()
        thread.join(20)
        newer.commit()
    assert (chunk_texts(), document()["revision"]) == (["one again"], 2)


def test_a_document_is_read_only_as_the_revision_that_was_asked_for() -> None:
    uploaded("one")
    id_ = document()["id"]
    with engine().connect() as connection:
        assert store.read(connection, id_, 1) == store.Stored("a.txt", "text/plain", b"one")
        assert store.read(connection, id_, 2) is None
        assert (store.is_current(connection, id_, 1), store.is_current(connection, id_, 2)) == (True, False)
