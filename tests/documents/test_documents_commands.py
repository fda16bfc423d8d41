"""ingest, search: what an operator types, and what comes back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

import commands
import settings
from tests.documents.files import pdf
from tests.documents.ledger import document, searchable, uploaded
from tests.servers import ServersOfTests
from tests.tasks.deliveries import delivered, scalar
from tests.tasks.door import manage
from tests.tasks.work import rows

pytestmark = pytest.mark.usefixtures("stack")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "my files"
    for name in ("a.md", "sub/b.txt", "sub/deep/c.html", ".hidden.md", ".git/x.md", "picture.png", "Makefile"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"the text of {name}")
    (folder / "d.pdf").write_bytes(pdf("Hello."))
    return folder


def stored() -> list[str]:
    return sorted(str(scalar("SELECT coalesce(string_agg(name, '|'), '') FROM ledger.document")).split("|"))


@pytest.mark.parametrize("name", ["ingest", "search"])
def test_the_help_has_an_example(name: str) -> None:
    shown = CliRunner().invoke(commands.app, [name, "--help"])
    assert shown.exit_code == 0
    assert f"Example: manage.py {name}" in shown.output


def test_a_folder_is_uploaded_with_what_is_below_it_and_what_is_left_out_is_counted(folder: Path) -> None:
    done = manage("ingest", folder)
    assert (done.code, done.err) == (0, "")
    assert stored() == ["a.md", "d.pdf", "sub/b.txt", "sub/deep/c.html"]
    assert done.out.splitlines() == [
        "uploaded: 4 (4 new or changed)",
        "skipped, hidden: 2",
        "skipped, unknown kind: 2",
    ]
    assert bytes(document("a.md")["content"]) == b"the text of a.md"
    assert len(rows()) == 4


def test_again_nothing_is_new_but_what_has_changed(folder: Path) -> None:
    first = manage("ingest", folder, "--json").json
    (folder / "a.md").write_text("changed")
    again = manage("ingest", folder, "--json").json
    created = {each["name"]: each["created"] for each in again["files"]}
    assert created == {"a.md": True, "d.pdf": False, "sub/b.txt": False, "sub/deep/c.html": False}
    assert first["skipped"] == again["skipped"] == {"hidden": 2, "unknown kind": 2}
    assert (again["failed"], again["dryRun"]) == ([], False)
    assert {each["taskId"] for each in again["files"]} - {each["taskId"] for each in first["files"]} == {
        next(each["taskId"] for each in again["files"] if each["created"])
    }


def test_a_dry_run_says_which_and_uploads_nothing(folder: Path) -> None:
    said = manage("ingest", folder, "--dry-run")
    assert said.code == 0
    assert said.out.splitlines()[:5] == ["a.md", "d.pdf", "sub/b.txt", "sub/deep/c.html", "4 files would be uploaded"]
    assert manage("ingest", folder, "--dry-run", "--json").json["files"][0] == {"name": "a.md"}
    assert scalar("SELECT count(*) FROM ledger.document") == 0


def test_a_file_that_is_named_is_taken_whatever_it_is_called(folder: Path) -> None:
    assert manage("ingest", folder / "sub" / "b.txt", folder / ".hidden.md", folder / "Makefile").code == 0
    assert stored() == [".hidden.md", "Makefile", "b.txt"]


def test_one_that_is_missing_or_too_large_is_named_and_the_others_are_uploaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCUMENT_MAX_BYTES", "2000")
    settings.current.cache_clear()
    (folder / "large.txt").write_text("x" * 2001)
    done = manage("ingest", folder, folder / "nowhere.txt")
    assert done.code == 1
    assert "nowhere.txt: No such file or directory." in done.err
    assert "large.txt: it has 2,001 bytes, and 2,000 is the most (DOCUMENT_MAX_BYTES)." in done.err
    assert "failed: 2" in done.out
    assert len(stored()) == 4


def test_two_files_that_would_have_one_name_do_not_replace_each_other(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.md").write_text("another")
    done = manage("ingest", folder, tmp_path / "other", "--json")
    assert done.code == 1
    (failed,) = done.json["failed"]
    assert "has the same name, a.md: give a folder above both" in failed["reason"]
    assert bytes(document("a.md")["content"]) == b"the text of a.md"
    assert manage("ingest", folder, folder).code == 0


def test_odd_names_are_names_and_steer_no_terminal(tmp_path: Path) -> None:
    odd = [b"\xff.txt", b"'; DROP TABLE document; --.txt", b"[red]x.md", b"a\x1b[31m\n.txt", "名前 🌱.md".encode()]
    for name in odd:
        (tmp_path / os.fsdecode(name)).write_text("text")
    done = manage("ingest", tmp_path, "--dry-run")
    assert "\x1b" not in done.out
    assert "[red]x.md" in done.out
    assert manage("ingest", tmp_path).code == 0
    assert stored() == sorted([r"\xff.txt", *(name.decode() for name in odd[1:])])


def test_links_and_things_that_are_no_files_do_not_hang_it(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.txt")
    assert manage("ingest", tmp_path, "--json").json["skipped"] == {"not a regular file": 2}
    refused = manage("ingest", tmp_path / "pipe.txt")
    assert (refused.code, "not a regular file" in refused.err) == (1, True)


def test_an_empty_folder_is_no_failure(tmp_path: Path) -> None:
    assert manage("ingest", tmp_path).out == "uploaded: 0 (0 new or changed)\n"
    assert manage("ingest", tmp_path, "--wait").code == 0


def test_a_file_whose_task_is_dead_is_a_failure_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    delivered([uploaded("", "empty.txt").task_id])
    done = manage("ingest", tmp_path)
    assert done.code == 1
    assert "empty.txt is dead: Permanent: The file is empty. (empty.txt) To try again: manage.py retry-now" in done.err
    assert "dead: 1" in done.out
    assert manage("ingest", tmp_path, "--json").json["dead"] == {
        "empty.txt": "Permanent: The file is empty. (empty.txt)"
    }


def test_whoever_waits_is_told_what_became_of_them(tmp_path: Path) -> None:
    """Nobody works here: the time is over at once."""
    (tmp_path / "a.txt").write_text("text")
    done = manage("ingest", tmp_path, "--wait", "--timeout", 0, "--json")
    assert done.code == 1
    assert done.json["statuses"] == {"QUEUED": 1}
    assert "Not all succeeded: 1 QUEUED" in done.err


def test_without_a_path_it_is_misuse() -> None:
    assert manage("ingest").code == 2
    assert manage("search").code == 2


def test_a_search_shows_names_ranks_and_what_was_found(stack: ServersOfTests) -> None:
    searchable("The lease [red]runs[/red] out.\x1b[31m", "[b]notes[/b].md")
    done = manage("search", "lease", "out")
    assert done.code == 0
    name, highlight, _, count = done.out.splitlines()
    assert name.startswith("[b]notes[/b].md  0.")
    assert highlight.startswith("The ⟦lease⟧ [red]runs[/red] ⟦out⟧")
    assert count == "1 place"
    assert "\x1b" not in done.out


def test_a_search_for_a_program(stack: ServersOfTests) -> None:
    for n in range(3):
        searchable(f"The lease number {n}.", f"{n}.md")
    hits = manage("search", "lease", "--limit", 2, "--json").json
    assert [sorted(hit) for hit in hits] == [["documentId", "highlight", "name", "position", "rank"]] * 2
    assert manage("search", "--json", "--", "-lease").json == []
    assert manage("search", "'; DROP TABLE document; --").out == "Nothing was found.\n"
    assert manage("search", "lease", "--limit", 0).code == 2
