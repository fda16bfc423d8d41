"""The copy in Chroma, against a server that speaks its API; a real one is not at hand."""

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
from documents.chunks import Chunk, chunks
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


def test_each_chunk_has_a_record_with_its_text_its_vector_and_where_it_is_from(server: ChromaServer) -> None:
    put(server, ONE, 3, "first", "second")
    assert sorted(server.records) == [f"{ONE}:3:0", f"{ONE}:3:1"]
    record = server.records[f"{ONE}:3:1"]
    assert record["document"] == "second"
    assert record["metadata"] == {"documentId": str(ONE), "revision": 3, "name": "a.txt", "position": 1}
    assert record["embedding"] == embedding("second")
    assert list(server.collections) == ["celeriac_documents"]


def test_the_same_again_changes_nothing(server: ChromaServer) -> None:
    put(server, ONE, 1, "first", "second")
    before = dict(server.records)
    put(server, ONE, 1, "first", "second")
    assert server.records == before


def test_a_new_revision_replaces_the_older_ones_of_its_document_alone(server: ChromaServer) -> None:
    put(server, OTHER, 1, "another")
    put(server, ONE, 1, "a", "b", "c")
    put(server, ONE, 2, "new")
    assert server.texts() == ["new", "another"]


def test_an_old_revision_that_comes_late_overwrites_nothing_and_can_be_taken_back(server: ChromaServer) -> None:
    put(server, ONE, 2, "new")
    put(server, ONE, 1, "late")
    assert server.records[f"{ONE}:2:0"]["document"] == "new"
    with Chroma(server.url) as client:
        client.forget(ONE, 1)
    assert server.texts() == ["new"]


def test_many_chunks_go_in_several_requests(server: ChromaServer) -> None:
    pieces = chunks("A sentence of some words. " * 12_000)
    with Chroma(server.url + "/") as client:
        client.put(ONE, 1, "a.txt", pieces)
    assert [server.records[f"{ONE}:1:{n}"]["document"] for n in range(len(pieces))] == [each.text for each in pieces]
    requests = [path for path in server.requests if path.endswith("/upsert")]
    assert len(requests) == math.ceil(len(pieces) / chroma.AT_ONCE) > 2
    assert server.requests[0] == COLLECTIONS


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ((500, "out of order"), "answers 500: out of order"),
        ((422, "missing field"), "answers 422"),
        ((301, ""), "answers 301"),
        ((200, "<html>"), "is not Chroma"),
        ((200, "[]"), "is not Chroma"),
        ((200, '{"id": "../../x"}'), "is not Chroma"),
    ],
)
def test_an_answer_that_is_none_is_a_failure_to_be_tried_again(
    server: ChromaServer, answer: tuple[int, str], sentence: str
) -> None:
    server.answers_with = answer
    with pytest.raises(ChromaFailed, match=sentence):
        put(server, ONE, 1, "text")


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://user:secret@127.0.0.1:1", "http://no.such.host.invalid"])
def test_nobody_there_is_a_failure_that_names_the_place_and_no_password(url: str) -> None:
    with pytest.raises(ChromaFailed) as failed, Chroma(url):
        pass
    assert "secret" not in str(failed.value)
    assert "127.0.0.1:1 " in str(failed.value) or "no.such.host.invalid" in str(failed.value)


@pytest.mark.parametrize("url", ["nonsense", "ftp://127.0.0.1", "http://[::bad"])
def test_an_address_that_is_none_stops_the_start(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHROMA_BASE_URL", url)
    with pytest.raises(ValidationError, match=r"(?i)chroma_base_url"):
        Settings()


def test_a_server_that_does_not_answer_in_time_is_a_failure(
    server: ChromaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = threading.Event()
    server.before_answering = lambda _path: done.wait(20)
    monkeypatch.setattr(chroma, "TIMEOUT_SECONDS", 0.1)
    with pytest.raises(ChromaFailed, match="does not answer"):
        put(server, ONE, 1, "text")
    done.set()


def test_certificates_are_checked_and_read_once() -> None:
    context = chroma._tls("https")
    assert isinstance(context, ssl.SSLContext)
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert chroma._tls("https") is context


def test_a_vector_is_the_same_for_the_same_words_and_near_for_similar_ones() -> None:
    def nearness(a: str, b: str) -> float:
        return sum(x * y for x, y in zip(embedding(a), embedding(b), strict=True))

    assert embedding("The lease") == embedding("the LEASE!")
    assert nearness("the lease of a worker", "a worker's lease") > nearness("the lease of a worker", "red roses") + 0.3
    for text in ("", "...", "one", "word " * 1000, "東京"):
        assert len(embedding(text)) == chroma.DIMENSIONS
        assert math.isclose(nearness(text, text), 1, abs_tol=1e-3)
