"""HTML → text: what a reader would see, in lines and paragraphs, with the title first.

The parser of the standard library keeps no tree: a million nested tags are a million events and no depth. Whatever the
page does to it in time or memory, `documents/extract.py` runs it in a process that has little of both.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Final

from documents.decoding import decoded
from documents.unreadable import Extracted, TooMuchText

MUTE: Final = frozenset({"script", "style"})
PARAGRAPHS: Final = frozenset(
    ("address", "article", "aside", "blockquote", "body", "caption", "dd", "details", "dialog", "div", "dl", "dt",
     "fieldset", "figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "legend",
     "main", "nav", "ol", "p", "pre", "section", "summary", "table", "ul")
)  # fmt: skip
LINES: Final = frozenset({"br", "li", "option", "tr"})
CELLS: Final = frozenset({"td", "th"})
DECLARED_WITHIN: Final = 1024  # where a page may say how it is encoded
DECLARATION: Final = re.compile(
    rb"""(?:charset|<\?xml[^>]{0,100}encoding)\s{0,9}=\s{0,9}["']?([A-Za-z0-9_:.-]{1,40})"""
)
SPACES: Final = re.compile(r"[ \t\n\f\r]+")


def read_html(content: bytes, *, charset: str | None, most: int) -> Extracted:
    page = _Page(most)
    page.feed(decoded(content, charset or _declared(content)))
    page.close()
    return Extracted(page.text())


def _declared(content: bytes) -> str | None:
    """A page that says UTF-16 in letters of one byte is not in UTF-16."""
    found = DECLARATION.search(content[:DECLARED_WITHIN])
    charset = found[1].decode().lower() if found else ""
    return None if charset.startswith(("utf-16", "utf-32")) else charset or None


class _Page(HTMLParser):
    """Collects words, and whether a space, a line or a paragraph stands between them."""

    def __init__(self, most: int) -> None:
        super().__init__(convert_charrefs=True)
        self.most = most
        self.length = 0
        self.parts: list[str] = []
        self.gap = ""  # what stands before the next word
        self.title: list[str] = []
        self.muted_by: str | None = None
        self.is_in_title = False
        self.pre_depth = 0

    def text(self) -> str:
        title = SPACES.sub(" ", "".join(self.title)).strip()
        body = "".join(self.parts).strip()
        return f"{title}\n\n{body}".strip() if title else body

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in MUTE:
            self.muted_by = tag
        elif tag == "title" and not self.title:  # the first: pictures (svg) have titles too
            self.is_in_title = True
        elif tag == "img":
            self._say(dict(attrs).get("alt") or "")
        self.pre_depth += tag == "pre"
        self._part(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag == self.muted_by:
            self.muted_by = None
        elif tag == "title":
            self.is_in_title = False
        self.pre_depth -= tag == "pre" and self.pre_depth > 0
        self._part(tag)

    def handle_data(self, data: str) -> None:
        if self.muted_by:
            return
        if self.is_in_title:
            self._count(data)
            self.title.append(data)
        elif self.pre_depth:
            self._add(data)
        else:
            self._say(data)

    def _say(self, data: str) -> None:
        """Spaces and ends of lines in a page are one space, or none beside a gap that is wider."""
        spaced = SPACES.sub(" ", data)
        if spaced.startswith(" "):
            self.gap = self.gap or " "
        if words := spaced.strip(" "):
            self._add(words)
            self.gap = " " if spaced.endswith(" ") else ""

    def _part(self, tag: str) -> None:
        if tag in PARAGRAPHS:
            self.gap = "\n\n"
        elif tag in LINES and self.gap != "\n\n":
            self.gap = "\n"
        elif tag in CELLS and not self.gap.startswith("\n"):
            self.gap = "\t"

    def _add(self, words: str) -> None:
        self._count(words)
        self.parts += (self.gap, words)
        self.gap = ""

    def _count(self, words: str) -> None:
        self.length += len(words)
        if self.length > self.most:
            raise TooMuchText(self.most)
