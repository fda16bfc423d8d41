"""The documents page shows, finds, stores and deletes what the API would for the same token, and nothing else."""

from __future__ import annotations

import re
import uuid
from typing import Any

import pytest
from fastapi.testclient import TestClient

import settings
from api.documents import upload_limit
from api.tokens import Scope
from console.app import FORM_LIMIT
from console.documents import CHOOSE, CHUNKS, PAGE, SHOWN
from console.links import new_link
from models.engine import engine
from tasks.execution.deliver import deliver
from tests.api.callers import make_token
from tests.console.visits import LOGIN, hidden_fields, logged_in, words
from tests.documents.ledger import add_searchable, read_document
from tests.servers import ServersOfTests
from tests.tasks.deliveries import scalar

TEXT = b"Every right to write is a lease with a fence.\n"
XSS = "<img src=x onerror=alert(1)>\"'><script>alert(1)</script>&amp;"
ALL = (Scope.OPERATE, Scope.DOCUMENTS_READ, Scope.DOCUMENTS_WRITE)


@pytest.fixture
def ann(stack: ServersOfTests) -> TestClient:
    return logged_in(make_token("ann", *ALL))


def visitor_with(name: str, *scopes: Scope) -> TestClient:
    return logged_in(make_token(name, *scopes))


def form_token(browser: TestClient) -> str:
    return hidden_fields(browser.get(PAGE).text)["form_token"]


def send(browser: TestClient, file_name: str, content: bytes, **fields: str) -> Any:
    fields = {"form_token": form_token(browser), **fields}
    return browser.post(PAGE, data=fields, files={"file": (file_name, content)})


def upload(browser: TestClient, content: bytes = TEXT, name: str = "rules.txt", *, runs: bool = True) -> str:
    """Upload a document as a browser does, run its task, and return the address that follows it."""
    answer = send(browser, name, content)
    assert answer.status_code == 303, answer.text
    path: str = answer.headers["location"]
    if runs:
        deliver(engine(), [path.partition("task=")[2]])
    return path


def page(browser: TestClient, path: str = PAGE) -> str:
    answer = browser.get(path)
    assert answer.status_code == 200, answer.text
    return str(answer.text)


def path_of(name: str = "rules.txt") -> str:
    return f"{PAGE}/{read_document(name)['id']}"


def delete(browser: TestClient, name: str = "rules.txt") -> Any:
    return browser.post(f"{path_of(name)}/delete", data={"form_token": form_token(browser)})


def test_an_upload_is_followed_from_stored_to_searchable(ann: TestClient) -> None:
    path = upload(ann, runs=False)
    waiting = page(ann, path)
    assert "rules.txt was uploaded." in words(waiting)
    assert 'data-refresh="2"' in waiting
    assert re.findall(r'<li class="(\w+)"', waiting.partition('class="steps"')[2])[:4] == [
        "done",
        "now",
        "next",
        "next",
    ]
    deliver(engine(), [path.partition("task=")[2]])
    done = page(ann, path)
    assert re.findall(r'<li class="(\w+)"', done.partition('class="steps"')[2])[:4] == ["done"] * 4
    characters = scalar("SELECT result ->> 'characters' FROM ledger.ingest_task")
    assert f"searchable: 1 chunk, {characters} characters." in words(done)
    assert read_document("rules.txt")["principal"] == "ann"
    assert f"/console/tasks/{path.partition('task=')[2]}" in done


def test_the_list_shows_what_the_ledger_has(ann: TestClient) -> None:
    upload(ann)
    upload(ann, b"x" * 1234, "new.md")
    rows = re.findall(r"<tr>\s*<th scope=\"row\".*?</tr>", page(ann), re.DOTALL)
    assert [words(each).partition(" succeeded")[0] for each in rows] == [
        "new.md text/markdown 1.2 KiB 2",
        "rules.txt text/plain 46 bytes 1",
    ]


def test_an_empty_installation_says_what_to_do_first(ann: TestClient) -> None:
    shown = words(page(ann))
    assert "Upload a file above" in shown
    assert "./manage.py documents add docs/ --wait" in shown


def test_older_documents_are_on_the_next_page(ann: TestClient) -> None:
    for number in range(SHOWN + 1):
        add_searchable("text", f"{number}.txt")
    first = page(ann)
    assert ">25.txt<" in first
    assert ">0.txt<" not in first
    (older,) = re.findall(r'href="([^"]*)" rel="next"', first)
    second = page(ann, older.replace("&amp;", "&"))
    assert re.findall(r">(\d+\.txt)<", second) == ["0.txt"]
    assert 'rel="next"' not in second
    assert ann.get(f"{PAGE}?before=yesterday").status_code == 400


def test_a_search_marks_the_words_and_leads_to_their_chunk(ann: TestClient) -> None:
    upload(ann, b"lease " + b"filler words here. " * 2000 + b"The fence is unique.")
    found = page(ann, f"{PAGE}?q=fence+unique")
    assert "<mark>fence</mark>" in found
    assert "data-refresh" not in found, "a search is not repeated every few seconds"
    (path,) = re.findall(r'<h3><a href="([^"]*)">rules.txt</a>', found)
    number = int(path.partition("#chunk-")[2])
    assert number >= CHUNKS
    assert f'id="chunk-{number}"' in page(ann, path.partition("#")[0])
    assert "No matches" in words(page(ann, f"{PAGE}?q=absent"))
    for odd in ("'", "\\", "⟦", "%00", "%F0%9F%92%A9", "a" * 2000):
        assert ann.get(f"{PAGE}?q={odd}").status_code == 200


def test_the_text_of_a_document_is_read_page_by_page(ann: TestClient) -> None:
    upload(ann, b"filler words here. " * 2000)
    first = page(ann, path_of())
    assert first.count('id="chunk-') == CHUNKS
    (older,) = re.findall(r'href="(\?from=\d+)" rel="next"', first)
    assert f'id="chunk-{CHUNKS}"' in page(ann, path_of() + older)
    for odd in ("?from=-1", "?from=x", "?from=99999999", "?from=" + "9" * 5000):
        assert ann.get(path_of() + odd).status_code == 200


def test_the_same_file_again_leads_to_the_same_task(ann: TestClient) -> None:
    path = upload(ann)
    answer = send(ann, "rules.txt", TEXT)
    assert answer.headers["location"] == path
    assert "rules.txt has not changed since it was uploaded before." in words(page(ann, path))
    assert scalar("SELECT count(*) FROM ledger.ingest_task") == 1


def test_a_name_can_be_given_and_a_file_is_needed(ann: TestClient) -> None:
    send(ann, "rules.txt", TEXT, name=" notes/a.txt ")
    assert read_document("notes/a.txt")["revision"] == 1
    for files in ({"file": ("", b"")}, {"another": ("a.txt", TEXT)}):
        answer = ann.post(PAGE, data={"form_token": form_token(ann)}, files=files)
        assert answer.headers["location"] == PAGE
        assert CHOOSE in words(page(ann))
    assert send(ann, "x" * 1001, TEXT).headers["location"] == PAGE
    assert "more than 1,000 bytes" in words(page(ann))
    two = [("file", ("a.txt", TEXT)), ("file", ("b.txt", TEXT))]
    assert ann.post(PAGE, data={"form_token": form_token(ann)}, files=two).status_code == 400
    assert scalar("SELECT count(*) FROM ledger.document") == 1


@pytest.mark.parametrize(("name", "content", "why"), [("a.txt", b"", "empty"), ("a.pdf", b"%PDF-1.4 broken", "PDF")])
def test_an_empty_or_broken_file_says_why_and_links_to_its_task(
    ann: TestClient, name: str, content: bytes, why: str
) -> None:
    path = upload(ann, content, name)
    shown = page(ann, path)
    (complaint,) = re.findall(r'<p class="complaint">(.*?)</p>', shown)
    assert why in complaint
    assert "there will be no further attempt" in shown
    assert f"/console/tasks/{path.partition('task=')[2]}" in shown
    assert why in page(ann, path_of(name))


def test_a_file_that_is_too_large_is_answered_413_in_a_sentence(
    ann: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCUMENT_MAX_BYTES", "100000")
    settings.current.cache_clear()
    assert send(ann, "ok.txt", b"x" * 100_000).status_code == 303, "a form with a file may exceed the limit of others"
    slightly = send(ann, "large.txt", b"x" * 100_001)
    assert (slightly.status_code, "the limit is 100,000" in words(slightly.text)) == (413, True)
    much = send(ann, "large.txt", b"x" * (upload_limit() + 1))
    assert (much.status_code, "The request body is too large" in words(much.text)) == (413, True)
    other = ann.post(f"{path_of('ok.txt')}/delete", content=b"x" * (FORM_LIMIT + 1))
    assert other.status_code == 413
    assert scalar("SELECT count(*) FROM ledger.document") == 1


def test_a_document_of_another_principal_is_neither_shown_found_nor_deleted(ann: TestClient) -> None:
    upload(ann)
    bob = visitor_with("bob", *ALL)
    assert "rules.txt" not in page(bob)
    assert "rules.txt" not in page(bob, f"{PAGE}?q=lease")
    assert bob.get(path_of()).status_code == 404
    delete(bob)
    assert "There is no such document" in words(page(bob))
    assert scalar("SELECT count(*) FROM ledger.document") == 1


def test_an_upload_can_be_followed_by_its_principal_only_unless_the_token_sees_all_tasks(ann: TestClient) -> None:
    path = upload(ann)
    eve = visitor_with("eve", Scope.DOCUMENTS_READ)
    assert "not in the ledger any more" in words(page(eve, path))
    assert "not in the ledger any more" in words(page(ann, f"{PAGE}?task={uuid.uuid4()}"))
    assert "not in the ledger any more" in words(page(ann, f"{PAGE}?task=x"))


def test_a_shared_document_is_shown_and_cannot_be_deleted_not_even_instead_of_an_own_one(ann: TestClient) -> None:
    shared = add_searchable("the lease of everyone", "rules.txt")
    upload(ann)
    shown = page(ann, f"{PAGE}/{shared}")
    assert "Delete" not in words(shown)
    assert "the lease of everyone" in shown
    ann.post(f"{PAGE}/{shared}/delete", data={"form_token": form_token(ann)})
    assert "There is no such document" in words(page(ann))
    assert scalar("SELECT count(*) FROM ledger.document") == 2


def test_deleting_a_document_deletes_its_text_and_says_so(ann: TestClient) -> None:
    upload(ann)
    assert "Delete the document" in words(page(ann, path_of()))
    answer = delete(ann)
    assert (answer.status_code, answer.headers["location"]) == (303, PAGE)
    assert "rules.txt was deleted." in words(page(ann))
    assert scalar("SELECT count(*) FROM ledger.document_chunk") == 0


def test_an_unknown_document_is_answered_404(ann: TestClient) -> None:
    for id_ in (uuid.uuid4(), "x", "%00"):
        answer = ann.get(f"{PAGE}/{id_}")
        assert answer.status_code == 404
        assert "There is no such document" in words(answer.text)


def test_an_operator_without_scopes_for_documents_is_told_which_are_missing(ann: TestClient) -> None:
    path = upload(ann)
    bob = visitor_with("bob", Scope.OPERATE)
    for shown in (page(bob), page(bob, f"{PAGE}?q=lease"), page(bob, path)):
        assert "bob lacks the scope documents:read" in words(shown)
        assert "bob lacks the scope documents:write" in words(shown)
        assert "rules.txt" not in shown
        assert "multipart" not in shown
    assert bob.get(path_of()).status_code == 403
    token = hidden_fields(page(bob))["form_token"]
    for to, more in ((PAGE, {"files": {"file": ("a.txt", TEXT)}}), (f"{path_of()}/delete", {})):
        answer = bob.post(to, data={"form_token": token}, **more)  # type: ignore[arg-type]
        assert answer.status_code == 403
        assert "documents:write" in words(answer.text)
    assert scalar("SELECT count(*) FROM ledger.document") == 1


def test_a_reader_of_tasks_needs_a_scope_for_documents(ann: TestClient) -> None:
    eve = visitor_with("eve", Scope.TASKS_READ_ALL)
    assert eve.get(PAGE).status_code == 403


def test_a_reader_of_documents_sees_neither_buttons_nor_the_message_of_the_handler(ann: TestClient) -> None:
    with_scopes = visitor_with("eve", Scope.DOCUMENTS_READ, Scope.DOCUMENTS_WRITE)
    path = upload(with_scopes, b"", "empty.txt")
    shown = page(with_scopes, path)
    assert re.findall(r'<p class="complaint">(.*?)</p>', shown) == ["The task can never succeed."]
    assert "/console/tasks/" not in shown, "this token has no page of tasks"
    add_searchable("the lease of everyone", "shared.txt")
    reader = visitor_with("joe", Scope.DOCUMENTS_READ)
    for each in (page(reader), page(reader, path_of("shared.txt"))):
        assert not re.search(r'<form method="post" action="/console/documents', each)
        assert "shared.txt" in each
    assert "joe lacks the scope documents:write" in words(page(reader))


def test_a_writer_without_read_may_only_upload() -> None:
    writer = visitor_with("sue", Scope.DOCUMENTS_WRITE)
    shown = page(writer, upload(writer))
    assert "The text is searchable" in words(shown)
    assert "sue lacks the scope documents:read" in words(shown)
    assert 'name="q"' not in shown.partition("<main")[2]
    assert writer.get(path_of()).status_code == 403


def test_a_form_with_a_file_is_refused_without_its_token_or_from_another_site(ann: TestClient) -> None:
    token = form_token(ann)
    for given in ({}, {"form_token": ""}, {"form_token": form_token(visitor_with("eve", *ALL))}):
        assert ann.post(PAGE, data=given, files={"file": ("a.txt", TEXT)}).status_code == 403
    file = {"file": ("a.txt", TEXT)}
    for foreign in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        assert ann.post(PAGE, data={"form_token": token}, files=file, headers=foreign).status_code == 403
    as_file = {"form_token": ("t", token.encode())}
    assert ann.post(PAGE, files=as_file).status_code == 403
    assert scalar("SELECT count(*) FROM ledger.document") == 0


def test_markup_in_names_types_texts_and_queries_is_escaped(ann: TestClient) -> None:
    text = f"{XSS} lease ⟦<b>bold</b>⟧ {XSS}".encode()
    path = send(ann, "a.txt", text, name=f"{XSS}.txt").headers["location"]
    deliver(engine(), [path.partition("task=")[2]])
    own = re.findall(rf'href="({PAGE}/[0-9a-f-]+)"', page(ann, path))[0]
    for each in (
        page(ann, path),
        page(ann),
        page(ann, f"{PAGE}?q=lease"),
        page(ann, own),
        page(ann, f"{PAGE}?q={XSS}"),
    ):
        body = each.partition("<main")[2]
        assert "<img" not in body
        assert "<script" not in body
        assert "<b>" not in body
        assert "&lt;img" in body
    dead = send(ann, "b.txt", b"", name=f"{XSS}b.txt").headers["location"]
    deliver(engine(), [dead.partition("task=")[2]])
    assert "&lt;img" in page(ann, dead).partition('class="complaint"')[2]
    assert "<img" not in page(ann, dead).partition("<main")[2]


def test_the_token_of_links_may_use_documents(guest: TestClient) -> None:
    path = new_link(settings.current()).partition("8000")[2]
    assert guest.post(LOGIN, data=hidden_fields(guest.get(path).text)).status_code == 303
    assert "The text is searchable" in words(page(guest, upload(guest)))
