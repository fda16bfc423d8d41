"""Documents: uploaded into the ledger, read and cut into chunks by `document.ingest`, searched by their words.

A document is known by its name. Each upload that changes it counts its `revision` up by one, and the key of its task is
the document and the revision: the same file again meets the same task, a changed one is a new task. Which revision is
current is said by the row of the document and by nobody else, so that tasks may run in any order: what is written is
checked against it in the same transaction (`store.replace_chunks`).
"""

from documents.search import Hit, search
from documents.store import BadDocumentName, DocumentTooLarge, upload

__all__ = ["BadDocumentName", "DocumentTooLarge", "Hit", "search", "upload"]
