"""Copy chunks to Chroma, a vector database, over its HTTP API v2. Used only if `CHROMA_BASE_URL` is set.

Chroma's server stores vectors but does not compute them (a request without `embeddings` is a 422); its own clients
compute them with a model that they download. Ours are computed here from the words alone: `embedding` always returns
the same vector for the same text and needs no model. It finds texts that share words, not texts of similar meaning. To
query the collection, send `embedding(question)`.

The id of a record is document, revision and position, so an old revision never overwrites a new one, and copying a
revision twice has the same effect as once. Chroma is not part of our transaction: the copy may appear shortly before
the chunks in the ledger, and the next attempt repairs what a failed attempt left behind.
"""

from __future__ import annotations

import math
import re
import ssl
import uuid
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

import httpx2

from documents.chunks import Chunk
from models.errors import CeleriacError
from settings import place

COLLECTION: Final = "celeriac_documents"
COLLECTIONS: Final = "/api/v2/tenants/default_tenant/databases/default_database/collections"
DIMENSIONS: Final = 256
CHUNKS_PER_REQUEST: Final = 100
TIMEOUT_SECONDS: Final = 5.0
WORD: Final = re.compile(r"\w+")


class ChromaFailed(CeleriacError):
    """Chroma is unreachable or refused the request.

    CHROMA_BASE_URL names a server that is stopped, is not Chroma, or answered with an error.
    """

    code = "chroma_failed"
    remedy = "Start Chroma or correct CHROMA_BASE_URL; the task is retried. Requeue it if it is DEAD."


class Chroma:
    """Our collection on one server. A context manager, because it keeps a connection open."""

    def __init__(self, url: str) -> None:
        self._place = place(url)
        self._collections = url.rstrip("/") + COLLECTIONS
        # trust_env=False: proxies and netrc passwords of this machine are not meant for this server
        self._client = httpx2.Client(
            timeout=TIMEOUT_SECONDS, trust_env=False, follow_redirects=False, verify=_tls(url.partition(":")[0].lower())
        )
        self._id = ""

    def __enter__(self) -> Chroma:
        try:
            self._id = self._collection_id()
        except BaseException:
            self._client.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def put(self, document_id: uuid.UUID, revision: int, name: str, chunks: Sequence[Chunk]) -> None:
        """Store the chunks of a revision and delete those of older revisions."""
        for start in range(0, len(chunks), CHUNKS_PER_REQUEST):
            part = list(enumerate(chunks[start : start + CHUNKS_PER_REQUEST], start))
            metadata = {"documentId": str(document_id), "revision": revision, "name": name}
            records = {
                "ids": [f"{document_id}:{revision}:{position}" for position, _ in part],
                "documents": [chunk.text for _, chunk in part],
                "embeddings": [embedding(chunk.text) for _, chunk in part],
                "metadatas": [{**metadata, "position": position} for position, _ in part],
            }
            self._post(f"/{self._id}/upsert", records)
        self._delete(document_id, {"$lt": revision})

    def delete_revision(self, document_id: uuid.UUID, revision: int) -> None:
        self._delete(document_id, {"$eq": revision})

    def delete_document(self, document_id: uuid.UUID) -> None:
        self._delete(document_id, {"$gte": 1})

    def _collection_id(self) -> str:
        metadata = {"embedding": "hashed words", "dimensions": DIMENSIONS}
        collection = self._post("", {"name": COLLECTION, "get_or_create": True, "metadata": metadata})
        try:
            return str(uuid.UUID(collection["id"]))
        except (TypeError, KeyError, ValueError, AttributeError):
            raise ChromaFailed(f"The server at {self._place} is not Chroma: its collection has no id.") from None

    def _delete(self, document_id: uuid.UUID, revision: Mapping[str, int]) -> None:
        where = {"$and": [{"documentId": {"$eq": str(document_id)}}, {"revision": revision}]}
        self._post(f"/{self._id}/delete", {"where": where})

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        try:
            answer = self._client.post(self._collections + path, json=body)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ChromaFailed(f"Chroma at {self._place} is unreachable: {error or type(error).__name__}.") from None
        if not answer.is_success:
            first_line = answer.text[:200].partition("\n")[0]
            raise ChromaFailed(f"Chroma at {self._place} answered {answer.status_code}: {first_line}")
        try:
            return answer.json()
        except ValueError:
            raise ChromaFailed(f"The server at {self._place} is not Chroma: its answer is not JSON.") from None


@cache
def _tls(scheme: str) -> ssl.SSLContext | bool:
    """Return the TLS context for https. It is cached, because loading all certificates takes a tenth of a second."""
    return httpx2.create_ssl_context() if scheme == "https" else False


def embedding(text: str) -> list[float]:
    """Return a vector of length 1. A word's hash selects its dimension; repetitions of a word count less and less."""
    counts: dict[str, int] = {}
    for word in WORD.findall(text.casefold()):
        counts[word] = counts.get(word, 0) + 1
    vector = [0.0] * DIMENSIONS
    for word, count in counts.items():
        hashed = zlib.crc32(word.encode())
        vector[hashed % DIMENSIONS] += (1 + math.log(count)) * (1 if hashed >> 31 else -1)
    length = math.sqrt(sum(value * value for value in vector))
    if not length:
        return [1.0, *[0.0] * (DIMENSIONS - 1)]  # no words, or they cancel each other out
    return [round(value / length, 6) for value in vector]
