"""manage.py documents add, list, search, delete, and the aliases `ingest` and `search`."""

from __future__ import annotations

import os
import pty
from pathlib import Path

import pytest
from typer.testing import CliRunner

import commands
import settings
from tests.documents.files import make_pdf
from tests.documents.ledger import add_searchable, read_document, run_tasks, search_names, upload
from tests.tasks.command_line import manage, started
from tests.tasks.deliveries import delivered, scalar
from tests.tasks.work import rows

pytestmark = pytest.mark.usefixtures("stack")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "my files"
    for name in ("a.md", "sub/b.txt", "sub/deep/c.html", ".hidden.md", ".git/x.md", "picture.png", "Makefile"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"the text of {name}")
    (folder / "d.pdf").write_bytes(make_pdf("Hello."))
    return folder


def stored_names() -> list[str]:
    return sorted(str(scalar("SELECT coalesce(string_agg(name, '|'), '') FROM ledger.document")).split("|"))


@pytest.mark.parametrize("name", ["add", "list", "search", "delete"])
def test_the_help_has_an_example(name: str) -> None:
    shown = CliRunner().invoke(commands.app, ["documents", name, "--help"])
    assert shown.exit_code == 0
    assert f"Example: manage.py documents {name}" in shown.output


@pytest.mark.parametrize(("alias", "name"), [("ingest", "add"), ("search", "search")])
def test_the_help_of_an_alias_names_the_command(alias: str, name: str) -> None:
    shown = CliRunner().invoke(commands.app, [alias, "--help"])
    assert shown.exit_code == 0
    assert f"Alias of documents {name}." in shown.output


def test_the_aliases_do_the_same(folder: Path) -> None:
    assert manage("ingest", folder, "--dry-run").out == manage("documents", "add", folder, "--dry-run").out
    add_searchable("The lease runs out.")
    assert manage("search", "lease").out == manage("documents", "search", "lease").out


# add


def test_a_folder_is_uploaded_and_skipped_files_are_counted(folder: Path) -> None:
    done = manage("documents", "add", folder)
    assert (done.code, done.err) == (0, "")
    assert stored_names() == ["a.md", "d.pdf", "sub/b.txt", "sub/deep/c.html"]
    assert done.out.splitlines() == [
        "uploaded: 4 (4 new or changed)",
        "skipped, hidden: 2",
        "skipped, unknown file type: 2",
    ]
    assert bytes(read_document("a.md")["content"]) == b"the text of a.md"
    assert len(rows()) == 4


def test_only_changed_files_get_a_new_task(folder: Path) -> None:
    first = manage("documents", "add", folder, "--json").json
    (folder / "a.md").write_text("changed")
    again = manage("documents", "add", folder, "--json").json
    created = {each["name"]: each["created"] for each in again["files"]}
    assert created == {"a.md": True, "d.pdf": False, "sub/b.txt": False, "sub/deep/c.html": False}
    assert first["skipped"] == again["skipped"] == {"hidden": 2, "unknown file type": 2}
    assert (again["failed"], again["dryRun"]) == ([], False)
    assert {each["taskId"] for each in again["files"]} - {each["taskId"] for each in first["files"]} == {
        next(each["taskId"] for each in again["files"] if each["created"])
    }


def test_a_dry_run_names_the_files_and_uploads_nothing(folder: Path) -> None:
    done = manage("documents", "add", folder, "--dry-run")
    assert done.code == 0
    assert done.out.splitlines()[:5] == ["a.md", "d.pdf", "sub/b.txt", "sub/deep/c.html", "4 files would be uploaded"]
    assert manage("documents", "add", folder, "--dry-run", "--json").json["files"][0] == {"name": "a.md"}
    assert scalar("SELECT count(*) FROM ledger.document") == 0


def test_a_file_that_is_given_itself_is_never_skipped(folder: Path) -> None:
    assert manage("documents", "add", folder / "sub" / "b.txt", folder / ".hidden.md", folder / "Makefile").code == 0
    assert stored_names() == [".hidden.md", "Makefile", "b.txt"]


def test_a_missing_or_too_large_file_is_reported_and_the_others_are_uploaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCUMENT_MAX_BYTES", "2000")
    settings.current.cache_clear()
    (folder / "large.txt").write_text("x" * 2001)
    done = manage("documents", "add", folder, folder / "nowhere.txt")
    assert done.code == 1
    assert "nowhere.txt: No such file or directory." in done.err
    assert "large.txt: the file has 2,001 bytes; the limit is 2,000 (DOCUMENT_MAX_BYTES)." in done.err
    assert "failed: 2" in done.out
    assert len(stored_names()) == 4


def test_a_file_does_not_replace_another_with_the_same_name(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.md").write_text("another")
    done = manage("documents", "add", folder, tmp_path / "other", "--json")
    assert done.code == 1
    (failed,) = done.json["failed"]
    assert "has the same name, a.md; add a folder that contains both" in failed["reason"]
    assert bytes(read_document("a.md")["content"]) == b"the text of a.md"
    assert manage("documents", "add", folder, folder).code == 0


def test_odd_file_names_are_stored_and_cannot_control_the_terminal(tmp_path: Path) -> None:
    odd = [b"\xff.txt", b"'; DROP TABLE document; --.txt", b"[red]x.md", b"a\x1b[31m\n.txt", "名前 🌱.md".encode()]
    for name in odd:
        (tmp_path / os.fsdecode(name)).write_text("text")
    done = manage("documents", "add", tmp_path, "--dry-run")
    assert "\x1b" not in done.out
    assert "[red]x.md" in done.out
    assert manage("documents", "add", tmp_path).code == 0
    assert stored_names() == sorted([r"\xff.txt", *(name.decode() for name in odd[1:])])


def test_links_and_pipes_do_not_make_it_hang(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.txt")
    assert manage("documents", "add", tmp_path, "--json").json["skipped"] == {"not a regular file": 2}
    refused = manage("documents", "add", tmp_path / "pipe.txt")
    assert (refused.code, "not a regular file" in refused.err) == (1, True)


def test_an_empty_folder_is_not_an_error(tmp_path: Path) -> None:
    assert manage("documents", "add", tmp_path).out == "uploaded: 0 (0 new or changed)\n"
    assert manage("documents", "add", tmp_path, "--wait").code == 0


def test_a_file_whose_task_is_dead_is_reported_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    delivered([upload("", "empty.txt").task_id])
    done = manage("documents", "add", tmp_path)
    assert done.code == 1
    assert "empty.txt is dead: Permanent: The file is empty. (empty.txt) To try again: manage.py retry-now" in done.err
    assert "dead: 1" in done.out
    assert manage("documents", "add", tmp_path, "--json").json["dead"] == {
        "empty.txt": "Permanent: The file is empty. (empty.txt)"
    }


def test_waiting_ends_at_the_timeout_and_reports_the_statuses(tmp_path: Path) -> None:
    """No worker is running."""
    (tmp_path / "a.txt").write_text("text")
    done = manage("documents", "add", tmp_path, "--wait", "--timeout", 0, "--json")
    assert done.code == 1
    assert done.json["statuses"] == {"QUEUED": 1}
    assert "Not all tasks succeeded: 1 QUEUED" in done.err


@pytest.mark.parametrize("name", ["add", "search", "delete"])
def test_a_missing_argument_is_misuse(name: str) -> None:
    assert manage("documents", name).code == 2


# search


def test_a_search_shows_names_ranks_and_highlights() -> None:
    add_searchable("The lease [red]runs[/red] out.\x1b[31m", "[b]notes[/b].md")
    done = manage("documents", "search", "lease", "out")
    assert done.code == 0
    name, highlight, _, count = done.out.splitlines()
    assert name.startswith("[b]notes[/b].md  0.")
    assert highlight.startswith("The ⟦lease⟧ [red]runs[/red] ⟦out⟧")
    assert count == "1 match"
    assert "\x1b" not in done.out


def test_a_search_prints_json() -> None:
    for n in range(3):
        add_searchable(f"The lease number {n}.", f"{n}.md")
    hits = manage("documents", "search", "lease", "--limit", 2, "--json").json
    assert [sorted(hit) for hit in hits] == [["documentId", "highlight", "name", "position", "rank"]] * 2
    assert manage("documents", "search", "--json", "--", "-lease").json == []
    assert manage("documents", "search", "'; DROP TABLE document; --").out == "No matches.\n"
    assert manage("documents", "search", "lease", "--limit", 0).code == 2


# list


def test_documents_are_listed_with_size_chunks_and_status() -> None:
    run_tasks([upload("The lease runs out.", "[b]a[/b].md").task_id, upload("", "empty\x1b.txt").task_id])
    heading, empty, lease = manage("documents", "list").out.splitlines()
    assert heading.split() == [
        "name", "revision", "bytes", "media", "type", "chunks", "task", "updated", "(UTC)",
        "principal",
    ]  # fmt: skip
    assert lease.split()[:6] == ["[b]a[/b].md", "1", "19", "text/markdown", "1", "SUCCEEDED"]
    assert empty.split()[:7] == ["empty", ".txt", "1", "0", "text/plain", "0", "DEAD"]


def test_a_page_ends_with_the_cursor_of_the_next() -> None:
    for n in range(3):
        upload("text", f"{n}.txt")
    first = manage("documents", "list", "--limit", 2, "--json").json
    rest = manage("documents", "list", "--limit", 2, "--before", first["before"], "--json").json
    assert [each["name"] for each in first["documents"] + rest["documents"]] == ["2.txt", "1.txt", "0.txt"]
    assert rest["before"] is None
    assert set(first["documents"][0]) == {
        "documentId", "name", "revision", "sizeBytes", "mediaType", "chunks", "status", "updatedAt", "principal",
    }  # fmt: skip
    assert f"--before {first['before']}" in manage("documents", "list", "--limit", 2).out
    refused = manage("documents", "list", "--before", "yesterday")
    assert (refused.code, "is not a cursor" in refused.err) == (2, True)


# delete


def test_named_documents_are_deleted() -> None:
    for name in ("a.txt", "[b].txt", "c.txt"):
        add_searchable("needle", name)
    done = manage("documents", "delete", "a.txt", "[b].txt", "--yes")
    assert (done.code, done.out.splitlines()) == (0, ["deleted: [b].txt", "deleted: a.txt"])
    assert search_names("needle") == ["c.txt"]
    assert manage("documents", "delete", "c.txt", "--yes", "--json").json == {"dryRun": False, "documents": ["c.txt"]}


def test_an_unknown_name_is_an_error_and_nothing_is_deleted() -> None:
    add_searchable("needle")
    done = manage("documents", "delete", "a.txt", "b.txt", "--yes")
    assert (done.code, done.out) == (1, "")
    assert "There is no document named 'b.txt'. Nothing was deleted." in done.err
    assert search_names("needle") == ["a.txt"]


def test_a_document_of_a_principal_is_deleted_only_if_the_principal_is_named() -> None:
    for principal in ("", "ci"):
        upload("needle", "a.txt", principal=principal)
    assert {each["principal"] for each in manage("documents", "list", "--json").json["documents"]} == {None, "ci"}
    assert manage("documents", "delete", "a.txt", "--yes").code == 0
    assert manage("documents", "delete", "a.txt", "--yes").code == 1
    assert [each["principal"] for each in manage("documents", "list", "--json").json["documents"]] == ["ci"]
    assert manage("documents", "delete", "a.txt", "--principal", "ci", "--yes").code == 0
    assert manage("documents", "list", "--json").json["documents"] == []


def test_a_dry_run_of_delete_deletes_nothing() -> None:
    add_searchable("needle")
    assert manage("documents", "delete", "a.txt", "--dry-run").out == "would be deleted: a.txt\n"
    assert manage("documents", "delete", "a.txt", "--dry-run", "--json").json["dryRun"] is True
    assert manage("documents", "delete", "b.txt", "--dry-run").code == 1
    assert search_names("needle") == ["a.txt"]


def test_without_a_terminal_delete_needs_yes() -> None:
    add_searchable("needle")
    done = manage("documents", "delete", "a.txt")
    assert (done.code, done.out) == (2, "")
    assert "Nothing was changed: add --yes." in done.err
    assert search_names("needle") == ["a.txt"]


@pytest.mark.parametrize(("answer", "code", "left"), [(b"n\n", 1, ["a.txt"]), (b"y\n", 0, [])])
def test_on_a_terminal_delete_asks_first(answer: bytes, code: int, left: list[str]) -> None:
    add_searchable("needle")
    ours, theirs = pty.openpty()
    os.write(ours, answer)
    with started("documents", "delete", "a.txt", stdin=theirs) as process:
        out, _ = process.communicate(timeout=60)
    os.close(ours)
    os.close(theirs)
    assert "Delete 1 document (a.txt)?" in out
    assert (process.returncode, search_names("needle")) == (code, left)
