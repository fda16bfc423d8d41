"""A server that implements the part of Chroma's HTTP API v2 that we use, as strictly as Chroma does."""

from __future__ import annotations

import json
import operator
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COLLECTIONS = "/api/v2/tenants/default_tenant/databases/default_database/collections"
COMPARE: dict[str, Callable[[Any, Any], bool]] = {"$eq": operator.eq, "$lt": operator.lt, "$gte": operator.ge}


class ChromaServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.collections: dict[str, str] = {}  # name → id
        self.records: dict[str, dict[str, Any]] = {}  # of our collection, by id
        self.requests: list[str] = []
        self.dimensions: int | None = None
        self.before_answering: Callable[[str], object] = lambda _path: None
        self.answers_with: tuple[int, str] | None = None  # a fixed answer, without doing anything

    def handle_error(self, *_: Any) -> None:
        """Print nothing when a client has closed its connection."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def texts(self) -> list[str]:
        return [self.records[id_]["document"] for id_ in sorted(self.records)]

    def do(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == COLLECTIONS:
            if body["name"] in self.collections and not body.get("get_or_create"):
                return 409, {"error": "exists"}
            id_ = self.collections.setdefault(body["name"], str(uuid.uuid4()))
            return 200, {"id": id_, "name": body["name"], "metadata": body.get("metadata")}
        found = re.fullmatch(f"{COLLECTIONS}/([0-9a-f-]+)/(upsert|delete)", path)
        if not found or found[1] not in self.collections.values():
            return 404, {"error": "no such collection"}
        return self._upsert(body) if found[2] == "upsert" else self._delete(body)

    def _upsert(self, body: dict[str, Any]) -> tuple[int, Any]:
        if "embeddings" not in body:
            return 422, "missing field `embeddings`"
        columns = [body[name] for name in ("ids", "embeddings", "documents", "metadatas")]
        if len({len(column) for column in columns}) != 1 or len(set(body["ids"])) != len(body["ids"]):
            return 400, {"error": "lengths differ, or an id occurs twice"}
        for id_, vector, document, metadata in zip(*columns, strict=True):
            self.dimensions = self.dimensions or len(vector)
            if len(vector) != self.dimensions:
                return 400, {"error": "dimensions differ"}
            if not all(isinstance(value, str | int | float | bool) for value in metadata.values()):
                return 422, "metadata must be flat"
            self.records[id_] = {"embedding": vector, "document": document, "metadata": metadata}
        return 200, {}

    def _delete(self, body: dict[str, Any]) -> tuple[int, Any]:
        if not body.get("ids") and not body.get("where"):
            return 400, {"error": "ids or where is required"}
        conditions = [next(iter(each.items())) for each in body["where"]["$and"]]

        def is_matching(metadata: dict[str, Any]) -> bool:
            return all(COMPARE[how](metadata[name], value) for name, test in conditions for how, value in test.items())

        self.records = {id_: each for id_, each in self.records.items() if not is_matching(each["metadata"])}
        return 200, {}


class _Requests(BaseHTTPRequestHandler):
    server: ChromaServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(self.path)
        if self.server.answers_with:
            status, written = self.server.answers_with
        else:
            status, answer = self.server.do(self.path, body)
            written = json.dumps(answer)
        self.server.before_answering(self.path)
        self.send_response(status)
        self.send_header("Content-Length", str(len(written.encode())))
        self.end_headers()
        self.wfile.write(written.encode())

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def chroma_server() -> Iterator[ChromaServer]:
    server = ChromaServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
