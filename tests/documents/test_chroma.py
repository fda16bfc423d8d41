"""The copy in Chroma, tested against `chroma_server.py`; no real Chroma is available here."""

from __future__ import annotations

import math
import ssl
import threading
import uuid
from collections.abc import Iterator

import pytest
from pydantic import ValidationError

from documents import chroma
from documents.chroma import Chroma, ChromaFailed, embedding
from documents.chunks import Chunk, split
from settings import Settings
from tests.documents.chroma_server import COLLECTIONS, ChromaServer, chroma_server

ONE, OTHER = uuid.UUID(int=1), uuid.UUID(int=2)


@pytest.fixture
def server() -> Iterator[ChromaServer]:
    with chroma_server() as server:
        yield server


def put(server: ChromaServer, document: uuid.UUID, revision: int, *texts: str) -> None:
    with Chroma(server.url) as client:
        client.put(document, revision, "a.txt", [Chunk(text, 0) for text in texts])


def test_each_chunk_is_a_record_with_its_text_vector_and_origin(server: ChromaServer) -> None:
    put(server, ONE, 3, "first", "second")
    assert sorted(server.records) == [f"{ONE}:3:0", f"{ONE}:3:1"]
    record = server.records[f"{ONE}:3:1"]
    assert record["document"] == "second"
    assert record["metadata"] == {"documentId": str(ONE), "revision": 3, "name": "a.txt", "position": 1}
    assert record["embedding"] == embedding("second")
    assert list(server.collections) == ["celeriac_documents"]


def test_copying_a_revision_twice_changes_nothing(server: ChromaServer) -> None:
    put(server, ONE, 1, "first", "second")
    before = dict(server.records)
    put(server, ONE, 1, "first", "second")
    assert server.records == before


def test_a_new_revision_deletes_older_ones_of_its_own_document_only(server: ChromaServer) -> None:
    put(server, OTHER, 1, "another")
    put(server, ONE, 1, "a", "b", "c")
    put(server, ONE, 2, "new")
    assert server.texts() == ["new", "another"]


def test_an_old_revision_that_comes_late_overwrites_nothing_and_can_be_deleted(server: ChromaServer) -> None:
    put(server, ONE, 2, "new")
    put(server, ONE, 1, "late")
    assert server.records[f"{ONE}:2:0"]["document"] == "new"
    with Chroma(server.url) as client:
        client.delete_revision(ONE, 1)
    assert server.texts() == ["new"]


def test_deleting_a_document_deletes_every_revision_of_it_and_nothing_else(server: ChromaServer) -> None:
    put(server, OTHER, 1, "another")
    put(server, ONE, 2, "new")
    put(server, ONE, 1, "late")
    with Chroma(server.url) as client:
        client.delete_document(ONE)
    assert server.texts() == ["another"]


def test_many_chunks_are_sent_in_several_requests(server: ChromaServer) -> None:
    chunks = split("A sentence of some words. " * 12_000)
    with Chroma(server.url + "/") as client:
        client.put(ONE, 1, "a.txt", chunks)
    assert [server.records[f"{ONE}:1:{n}"]["document"] for n in range(len(chunks))] == [chunk.text for chunk in chunks]
    requests = [path for path in server.requests if path.endswith("/upsert")]
    assert len(requests) == math.ceil(len(chunks) / chroma.CHUNKS_PER_REQUEST) > 2
    assert server.requests[0] == COLLECTIONS


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ((500, "out of order"), "answered 500: out of order"),
        ((422, "missing field"), "answered 422"),
        ((301, ""), "answered 301"),
        ((200, "<html>"), "is not Chroma"),
        ((200, "[]"), "is not Chroma"),
        ((200, '{"id": "../../x"}'), "is not Chroma"),
    ],
)
def test_an_unusable_answer_is_an_error(server: ChromaServer, answer: tuple[int, str], sentence: str) -> None:
    server.answers_with = answer
    with pytest.raises(ChromaFailed, match=sentence):
        put(server, ONE, 1, "text")


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://user:secret@127.0.0.1:1", "http://no.such.host.invalid"])
def test_an_unreachable_server_is_an_error_that_names_the_host_but_no_password(url: str) -> None:
    with pytest.raises(ChromaFailed) as failed, Chroma(url):
        pass
    assert "secret" not in str(failed.value)
    assert "127.0.0.1:1 " in str(failed.value) or "no.such.host.invalid" in str(failed.value)


@pytest.mark.parametrize("url", ["nonsense", "ftp://127.0.0.1", "http://[::bad"])
def test_an_invalid_address_is_rejected_with_the_settings(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHROMA_BASE_URL", url)
    with pytest.raises(ValidationError, match=r"(?i)chroma_base_url"):
        Settings()


def test_a_server_that_answers_too_late_is_an_error(server: ChromaServer, monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()
    server.before_answering = lambda _path: done.wait(20)
    monkeypatch.setattr(chroma, "TIMEOUT_SECONDS", 0.1)
    with pytest.raises(ChromaFailed, match="is unreachable"):
        put(server, ONE, 1, "text")
    done.set()


def test_certificates_are_verified_and_loaded_once() -> None:
    context = chroma._tls("https")
    assert isinstance(context, ssl.SSLContext)
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert chroma._tls("https") is context


def test_texts_with_the_same_words_have_close_vectors() -> None:
    def similarity(a: str, b: str) -> float:
        return sum(x * y for x, y in zip(embedding(a), embedding(b), strict=True))

    assert embedding("The lease") == embedding("the LEASE!")
    lease = "the lease of a worker"
    assert similarity(lease, "a worker's lease") > similarity(lease, "red roses") + 0.3
    for text in ("", "...", "one", "word " * 1000, "東京"):
        assert len(embedding(text)) == chroma.DIMENSIONS
        assert math.isclose(similarity(text, text), 1, abs_tol=1e-3)
