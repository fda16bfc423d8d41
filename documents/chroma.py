"""A copy of each chunk in Chroma, a vector database, over its HTTP API v2. Only if `CHROMA_BASE_URL` is set.

Chroma's server takes vectors and makes none (a request without `embeddings` is a 422): its own clients compute them
with a model that they download. Ours are computed here, of the words alone: `embedding` is the same for the same text,
for ever, needs no model, and finds texts that share words. It knows no meaning. Whoever queries the collection sends
`embedding(question)`.

The id of a record is document, revision and position, so an old revision never overwrites a new one, and the same one
twice is the same. No transaction of ours reaches Chroma: the copy may be a moment ahead of the ledger, and what an
attempt left behind is put right by the next one.
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
AT_ONCE: Final = 100
TIMEOUT_SECONDS: Final = 5.0
WORD: Final = re.compile(r"\w+")


class ChromaFailed(CeleriacError):
    """Chroma did not do what it was asked for. Tried again: it may be back, or better configured."""

    code = "chroma_failed"


class Chroma:
    """One collection of one server; a context manager, because it keeps a connection."""

    def __init__(self, url: str) -> None:
        self._place = place(url)
        self._collections = url.rstrip("/") + COLLECTIONS
        # proxies and passwords of this machine's environment are not for this server
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

    def put(self, document_id: uuid.UUID, revision: int, name: str, pieces: Sequence[Chunk]) -> None:
        """The chunks of a revision; those of older ones go."""
        for start in range(0, len(pieces), AT_ONCE):
            some = list(enumerate(pieces[start : start + AT_ONCE], start))
            told = {"documentId": str(document_id), "revision": revision, "name": name}
            records = {
                "ids": [f"{document_id}:{revision}:{position}" for position, _ in some],
                "documents": [piece.text for _, piece in some],
                "embeddings": [embedding(piece.text) for _, piece in some],
                "metadatas": [{**told, "position": position} for position, _ in some],
            }
            self._post(f"/{self._id}/upsert", records)
        self._forget(document_id, {"$lt": revision})

    def forget(self, document_id: uuid.UUID, revision: int) -> None:
        """What this revision has left there."""
        self._forget(document_id, {"$eq": revision})

    def _collection_id(self) -> str:
        told = {"embedding": "hashed words", "dimensions": DIMENSIONS}
        made = self._post("", {"name": COLLECTION, "get_or_create": True, "metadata": told})
        try:
            return str(uuid.UUID(made["id"]))
        except (TypeError, KeyError, ValueError, AttributeError):
            raise ChromaFailed(f"What answers at {self._place} is not Chroma: its collection has no id.") from None

    def _forget(self, document_id: uuid.UUID, revision: Mapping[str, int]) -> None:
        which = {"$and": [{"documentId": {"$eq": str(document_id)}}, {"revision": revision}]}
        self._post(f"/{self._id}/delete", {"where": which})

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        try:
            answer = self._client.post(self._collections + path, json=body)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ChromaFailed(f"Chroma at {self._place} does not answer: {error or type(error).__name__}.") from None
        if not answer.is_success:
            said = answer.text[:200].partition("\n")[0]
            raise ChromaFailed(f"Chroma at {self._place} answers {answer.status_code}: {said}")
        try:
            return answer.json()
        except ValueError:
            raise ChromaFailed(f"What answers at {self._place} is not Chroma: its answer is not JSON.") from None


@cache
def _tls(scheme: str) -> ssl.SSLContext | bool:
    """Made once: reading all certificates of the world takes a tenth of a second. http:// has no use for them."""
    return httpx2.create_ssl_context() if scheme == "https" else False


def embedding(text: str) -> list[float]:
    """A vector of length 1. The hash of a word is its place; each further time it is there counts less."""
    counts: dict[str, int] = {}
    for word in WORD.findall(text.casefold()):
        counts[word] = counts.get(word, 0) + 1
    vector = [0.0] * DIMENSIONS
    for word, count in counts.items():
        hashed = zlib.crc32(word.encode())
        vector[hashed % DIMENSIONS] += (1 + math.log(count)) * (1 if hashed >> 31 else -1)
    length = math.sqrt(sum(value * value for value in vector))
    if not length:
        return [1.0, *[0.0] * (DIMENSIONS - 1)]  # no words, or they cancel each other out: Chroma refuses no vector
    return [round(value / length, 6) for value in vector]
