"""HTML: extract the text that a reader sees; a hostile page harms only the process that reads it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from documents import extract
from documents.extract import ReaderFailed
from documents.html_text import read_html
from documents.unreadable import Unreadable
from tests.documents.files import MIB, read

PAGE = """<!DOCTYPE html><html><head><title>Leases &amp;
  Fences</title><style>p { color: red }</style>
<script>document.write("<p>never shown</p>")</script></head>
<body><!-- a <p>comment</p> --><h1>One</h1><p>caf&eacute; &#8212; <b>bo</b>ld
text.</p><ul><li>first<li>second</ul><table><tr><td>a</td><td>b</td></tr></table>
<img src=x alt="a diagram"><pre>  kept
    as it is</pre><script type=module>more()</script>last &lt;tag&gt;</body></html>"""


def extract_text(page: str) -> str:
    return read_html(page.encode(), charset=None, max_characters=MIB).text


def test_a_page_becomes_the_text_a_reader_sees_with_its_title_first() -> None:
    assert read(PAGE.encode(), "a.html").text.split("\n\n") == [
        "Leases & Fences",
        "One",
        "café — bold text.",
        "first\nsecond",
        "a\tb",
        "a diagram",
        "  kept\n    as it is",
        "last <tag>",
    ]


@pytest.mark.parametrize(
    "page",
    [
        "<script>hidden</script>seen",
        "<STYLE>hidden</STYLE>seen",
        "<script>'</scrip'; hidden</script >seen",
        "seen<script>hidden",
        "<style><!-- hidden --></style>seen",
        "<?xml hidden?>seen",
    ],
)
def test_scripts_styles_and_comments_are_left_out(page: str) -> None:
    assert extract_text(page) == "seen"


@pytest.mark.parametrize(
    "page",
    [
        b"<meta charset=windows-1251>" + "Москва".encode("cp1251"),
        b'<?xml version="1.0" encoding="koi8-r"?><p>' + "Москва".encode("koi8-r"),
        b'<meta http-equiv="Content-Type" content="text/html; charset=utf-8">' + "Москва".encode(),
        b'<meta charset="utf-16">' + "Москва".encode(),
        "<p>Москва".encode("utf-16"),
    ],
    ids=["meta", "xml", "http-equiv", "wrong", "byte order mark"],
)
def test_the_encoding_that_a_page_declares_is_used(page: bytes) -> None:
    assert read(page, "a.html").text == "Москва"


def test_deeply_nested_tags_exhaust_neither_stack_nor_memory() -> None:
    page = b"<b>" * 300_000 + b"deep"
    assert read(page, "a.html", memory_bytes=128 * MIB).text == "deep"


def test_a_page_that_takes_too_much_processor_time_is_rejected() -> None:
    with pytest.raises(Unreadable, match=r"more than 1 s of processor time \(DOCUMENT_MAX_SECONDS\)"):
        read(b"<!" * 1_000_000, "a.html", cpu_seconds=1)


def test_a_page_that_takes_too_much_memory_is_rejected() -> None:
    with pytest.raises(Unreadable, match="more than 96 MiB of memory"):
        read(b"word " * 8_000_000, "a.html", memory_bytes=96 * MIB)


def test_a_page_with_too_much_text_is_rejected() -> None:
    with pytest.raises(Unreadable, match="more than 1,000 characters"):
        read(b"<p>" + b"word " * 500, "a.html", max_characters=1000)
    with pytest.raises(Unreadable, match="more than 1,000 characters"):
        read(b"<title>" + b"word " * 500, "a.html", max_characters=1000)


def test_the_reader_process_gets_no_secret_and_loads_only_what_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = "import os, runpy, sys; sys.argv = [sys.argv[1], sys.argv[2]]; "
    script += "runpy.run_path(sys.argv[0], run_name='__main__'); "
    script += "print(sorted({name.partition('.')[0] for name in sys.modules} & {'sqlalchemy', 'celery', 'pypdf'}))"
    limits = {"maxCharacters": 99, "maxPages": 1, "memoryBytes": 1_000_000_000, "cpuSeconds": 9}
    options = json.dumps({"kind": "HTML", "charset": None, **limits})
    command = [sys.executable, "-I", "-c", script, str(extract.PROGRAM), options]
    done = subprocess.run(command, input=b"<p>hi", capture_output=True, env={}, check=True)
    assert done.stdout == b'{"text": "hi", "pages": null}[]\n'
    passed: dict[str, object] = {}
    real = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *a, **options: passed.update(options) or real(*a, **options))
    assert read(b"<p>hi", "a.html").text == "hi"
    assert passed["env"] == {}


def test_a_reader_process_that_fails_does_not_make_the_file_unreadable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setattr(extract, "PROGRAM", f"{tmp_path}/gone.py")
    with pytest.raises(ReaderFailed, match=r"gone\.py"):
        read(b"<p>hi", "a.html")


def test_a_reader_process_that_takes_too_long_names_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extract, "START_SECONDS", -1.99)
    with pytest.raises(ReaderFailed, match=r"took longer than 0\.01 s \(10 s \+ 2 · DOCUMENT_MAX_SECONDS\)"):
        read(b"<p>hi", "a.html", cpu_seconds=1)


def test_a_reader_process_that_is_killed_is_reported_as_such(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "killed.py"
    program.write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    monkeypatch.setattr(extract, "PROGRAM", program)
    with pytest.raises(ReaderFailed, match="was killed; the machine may lack memory"):
        read(b"<p>hi", "a.html")


@given(st.text(alphabet="<>/!-abcspript\"'= &;#x\n", max_size=200))
def test_any_input_is_read_without_an_error(page: str) -> None:
    assert isinstance(extract_text(page), str)


@given(st.lists(st.text(alphabet="abcdefgé", min_size=1, max_size=8), max_size=20))
def test_no_word_is_lost_or_joined_with_another(words: list[str]) -> None:
    tags = ("<p>{}</p>", "<b>{}</b> ", "\n{}\n", "<li>{}", "<td>{}</td>", "<br>{}<br>", "<div>{}")
    page = "".join(tags[place % len(tags)].format(word) for place, word in enumerate(words))
    assert extract_text(page).split() == words
