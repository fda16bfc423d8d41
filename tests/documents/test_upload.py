"""Uploading: one row per name and one task per change, in the caller's transaction."""

from __future__ import annotations

import hashlib
import threading
import uuid

import pytest

import documents
import settings
from documents import BadDocumentName, DocumentTooLarge, store
from documents.chunks import split
from models.engine import engine, sessions
from models.sql import sql
from tasks import Discard
from tasks.operations.dead_tasks import Choice, discard
from tests.documents.ledger import add_searchable, read_chunks, read_document, upload
from tests.tasks.deliveries import delivered, scalar, wait_until_blocked
from tests.tasks.work import rows, task

pytestmark = pytest.mark.usefixtures("stack")


def test_an_upload_writes_a_document_and_a_task_that_carries_ids_only() -> None:
    submitted = upload("Hello reader.", "notes/a.md")
    row = read_document("notes/a.md")
    assert (submitted.created, submitted.status) == (True, "QUEUED")
    assert (bytes(row["content"]), row["media_type"], row["revision"]) == (b"Hello reader.", "text/markdown", 1)
    assert bytes(row["sha256"]) == hashlib.sha256(b"Hello reader.").digest()
    assert task(submitted.task_id)["payload"] == {"documentId": str(row["id"]), "revision": 1}


def test_an_upload_that_is_rolled_back_leaves_nothing() -> None:
    with sessions()() as session:
        documents.upload(session, name="a.txt", content=b"text")
        session.rollback()
    assert (rows(), scalar("SELECT count(*) FROM ledger.document")) == ([], 0)


def test_the_same_file_again_returns_the_same_task() -> None:
    first = upload("text")
    changed_at = read_document()["updated_at"]
    again = upload("text")
    assert (again.task_id, again.created) == (first.task_id, False)
    assert (read_document()["revision"], read_document()["updated_at"]) == (1, changed_at)


def test_another_name_is_another_document_with_the_same_content() -> None:
    assert upload("text", "a.txt").task_id != upload("text", "b.txt").task_id
    assert read_document("a.txt")["id"] != read_document("b.txt")["id"]


def test_each_change_of_a_file_is_a_new_task_even_a_change_back() -> None:
    upload("one")
    id_ = read_document()["id"]
    tasks = [upload(content).task_id for content in ("one", "two", "one", "one")]
    assert len(set(tasks)) == 3
    assert tasks[2] == tasks[3]
    assert (read_document()["id"], read_document()["revision"], bytes(read_document()["content"])) == (id_, 3, b"one")


def test_another_media_type_is_a_change_too() -> None:
    assert upload("<p>a", "a.txt").task_id != upload("<p>a", "a.txt", "text/html").task_id
    assert upload("<p>a", "a.txt", "TEXT/HTML").created is False


def test_a_discarded_task_is_submitted_again_and_a_dead_one_is_not() -> None:
    first = upload("")
    delivered([first.task_id])
    assert (upload("").task_id, upload("").status) == (first.task_id, "DEAD")
    assert list(discard(engine(), Choice([first.task_id]), actor="me")) == [[first.task_id]]
    again = upload("")
    assert (again.created, again.task_id != first.task_id, read_document()["revision"]) == (True, True, 2)


def test_odd_names_are_stored_unchanged() -> None:
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
        assert upload("text", name).created
        assert read_document(name)["name"] == name


def test_invalid_names_are_rejected() -> None:
    for name in ["", "  ", "a\0b", "a\udc80b", "x" * 1001, "é" * 501]:
        with pytest.raises(BadDocumentName):
            upload("text", name)
    assert rows() == []


def test_a_file_over_the_limit_is_rejected_before_anything_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCUMENT_MAX_BYTES", "10")
    settings.current.cache_clear()
    with pytest.raises(DocumentTooLarge, match="11 bytes; the limit is 10"):
        upload("x" * 11)
    assert upload("x" * 10).created
    assert DocumentTooLarge.http_status == 413


def test_of_two_concurrent_uploads_of_one_name_the_last_to_commit_wins() -> None:
    with sessions()() as second, sessions()() as first:  # if a check fails, this frees the thread first
        documents.upload(first, name="a.txt", content=b"one")
        pid = second.execute(sql("SELECT pg_backend_pid()")).scalar_one()
        thread = threading.Thread(target=documents.upload, args=(second,), kwargs={"name": "a.txt", "content": b"two"})
        thread.start()
        wait_until_blocked(pid)
        first.commit()
        thread.join(20)
        second.commit()
    assert (read_document()["revision"], bytes(read_document()["content"])) == (2, b"two")
    assert len(rows()) == 2


def test_chunks_are_all_replaced() -> None:
    id_ = add_searchable("long " * 1000)
    assert len(read_chunks()) > 3
    assert add_searchable("short") == id_
    assert read_chunks() == ["short"]


@pytest.mark.guarantee
def test_an_old_revision_writes_nothing() -> None:
    id_ = add_searchable("new")
    with sessions().begin() as session:
        session.execute(sql("UPDATE ledger.document SET revision = 5"))
    for revision in (1, 4, 6):
        with pytest.raises(Discard), sessions().begin() as session:
            store.replace_chunks(session, id_, revision, split("old"))
    with pytest.raises(Discard), sessions().begin() as session:
        store.replace_chunks(session, uuid.uuid4(), 5, split("unknown"))
    assert read_chunks() == ["new"]


@pytest.mark.guarantee
def test_an_older_revision_that_waits_for_an_upload_writes_nothing() -> None:
    id_ = add_searchable("one")
    discarded: list[Exception] = []

    def write_old() -> None:
        try:
            store.replace_chunks(older, id_, 1, split("one, late"))
        except Discard as discard:
            discarded.append(discard)

    with sessions()() as older, sessions()() as newer:  # if a check fails, this frees the thread first
        documents.upload(newer, name="a.txt", content=b"two")
        pid = older.execute(sql("SELECT pg_backend_pid()")).scalar_one()
        thread = threading.Thread(target=write_old)
        thread.start()
        wait_until_blocked(pid)
        newer.commit()
        thread.join(20)
        older.rollback()
    assert len(discarded) == 1
    assert read_chunks() == ["one"]


def test_an_upload_waits_for_chunks_that_are_being_written() -> None:
    id_ = add_searchable("one")
    with sessions()() as newer, sessions()() as writer:  # if a check fails, this frees the thread first
        store.replace_chunks(writer, id_, 1, split("one again"))
        pid = newer.execute(sql("SELECT pg_backend_pid()")).scalar_one()
        thread = threading.Thread(target=documents.upload, args=(newer,), kwargs={"name": "a.txt", "content": b"two"})
        thread.start()
        wait_until_blocked(pid)
        writer.commit()
        thread.join(20)
        newer.commit()
    assert (read_chunks(), read_document()["revision"]) == (["one again"], 2)


def test_only_the_current_revision_can_be_read() -> None:
    upload("one")
    id_ = read_document()["id"]
    with engine().connect() as connection:
        assert store.read(connection, id_, 1) == store.Stored("", "a.txt", "text/plain", b"one")
        assert store.read(connection, id_, 2) is None
        assert (store.is_current(connection, id_, 1), store.is_current(connection, id_, 2)) == (True, False)
