"""Documents: upload files, split their text into chunks, and search the chunks by words.

A document is identified by its principal and its name. The principal is the name of the API token that uploaded it; a
document that was added from Python or the command line has none and is shared. `visible_to` limits a list or a search
to the documents of one principal and the shared ones.

Each upload that changes it increments its `revision`, and the idempotency key of its `document.ingest` task is the
document id and the revision. So uploading the same file again finds the existing task, and a changed file gets a new
one. The row of the document says which revision is current. Tasks may run in any order, because each one compares its
revision with that row in the transaction that writes its chunks (`store.replace_chunks`).
"""

from documents.deletion import delete
from documents.search import Hit, search
from documents.store import (
    BadDocumentName,
    DocumentTooLarge,
    ListedDocument,
    UnknownDocument,
    check_upload,
    find_document,
    list_documents,
    read_chunks,
    task_key,
    upload,
)

__all__ = [
    "BadDocumentName",
    "DocumentTooLarge",
    "Hit",
    "ListedDocument",
    "UnknownDocument",
    "check_upload",
    "delete",
    "find_document",
    "list_documents",
    "read_chunks",
    "search",
    "task_key",
    "upload",
]
