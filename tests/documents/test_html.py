"""HTML: what a reader sees of it is its text, and a hostile page costs its own process and nobody else."""

from __future__ import annotations

import subprocess
import sys

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


def text_of(page: str, most: int = MIB) -> str:
    return read_html(page.encode(), charset=None, most=most).text


def test_a_page_becomes_what_a_reader_sees_with_its_title_first() -> None:
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
def test_scripts_styles_and_comments_are_not_seen(page: str) -> None:
    assert text_of(page) == "seen"


@pytest.mark.parametrize(
    "page",
    [
        b"<meta charset=windows-1251>" + "Москва".encode("cp1251"),
        b'<?xml version="1.0" encoding="koi8-r"?><p>' + "Москва".encode("koi8-r"),
        b'<meta http-equiv="Content-Type" content="text/html; charset=utf-8">' + "Москва".encode(),
        b'<meta charset="utf-16">' + "Москва".encode(),
        "<p>Москва".encode("utf-16"),
    ],
    ids=["meta", "xml", "http-equiv", "a lie", "marked"],
)
def test_a_page_says_itself_how_it_is_encoded(page: bytes) -> None:
    assert read(page, "a.html").text == "Москва"


def test_nested_tags_have_no_depth() -> None:
    page = b"<b>" * 300_000 + b"deep"
    assert read(page, "a.html", memory_bytes=128 * MIB).text == "deep"


def test_a_page_on_which_the_parser_never_ends_is_refused_and_only_its_process_ends() -> None:
    with pytest.raises(Unreadable, match="more than 1 s of processor time"):
        read(b"<!" * 1_000_000, "a.html", cpu_seconds=1)


def test_a_page_that_needs_more_memory_than_it_gets_is_refused() -> None:
    with pytest.raises(Unreadable, match="more than 96 MiB of memory"):
        read(b"word " * 8_000_000, "a.html", memory_bytes=96 * MIB)


def test_a_page_with_too_much_text_is_refused() -> None:
    with pytest.raises(Unreadable, match="more than 1,000 characters"):
        read(b"<p>" + b"word " * 500, "a.html", most=1000)
    with pytest.raises(Unreadable, match="more than 1,000 characters"):
        read(b"<title>" + b"word " * 500, "a.html", most=1000)


def test_the_process_that_reads_has_no_secret_of_ours_and_loads_nothing_it_does_not_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = "import os, runpy, sys; sys.argv = [sys.argv[1], sys.argv[2]]; "
    asked += "runpy.run_path(sys.argv[0], run_name='__main__'); "
    asked += "print(sorted({name.partition('.')[0] for name in sys.modules} & {'sqlalchemy', 'celery', 'pypdf'}))"
    how = '{"kind": "HTML", "charset": null, "most": 99, "mostPages": 1, "memoryBytes": 1000000000, "cpuSeconds": 9}'
    command = [sys.executable, "-I", "-c", asked, str(extract.PROGRAM), how]
    done = subprocess.run(command, input=b"<p>hi", capture_output=True, env={}, check=True)
    assert done.stdout == b'{"text": "hi", "pages": null}[]\n'
    given: dict[str, object] = {}
    real = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *a, **how: given.update(how) or real(*a, **how))
    assert read(b"<p>hi", "a.html").text == "hi"
    assert given["env"] == {}


def test_a_process_that_is_killed_by_somebody_is_no_fault_of_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setattr(extract, "PROGRAM", f"{tmp_path}/gone.py")
    with pytest.raises(ReaderFailed, match=r"gone\.py"):
        read(b"<p>hi", "a.html")


@given(st.text(alphabet="<>/!-abcspript\"'= &;#x\n", max_size=200))
def test_any_page_is_read(page: str) -> None:
    assert isinstance(text_of(page), str)


@given(st.lists(st.text(alphabet="abcdefgé", min_size=1, max_size=8), max_size=20))
def test_no_word_is_lost_or_glued_to_another(words: list[str]) -> None:
    tags = ("<p>{}</p>", "<b>{}</b> ", "\n{}\n", "<li>{}", "<td>{}</td>", "<br>{}<br>", "<div>{}")
    page = "".join(tags[place % len(tags)].format(word) for place, word in enumerate(words))
    assert text_of(page).split() == words
