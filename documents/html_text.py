"""Extract the text that a reader of an HTML page sees, in lines and paragraphs, with the title first.

The parser of the standard library builds no tree, so a million nested tags cost no depth. `documents/extract.py` runs
it in a child process, because a hostile page can make it use much time or memory.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Final

from documents.decoding import decode
from documents.unreadable import Extracted, TooMuchText

HIDDEN: Final = frozenset({"script", "style"})
PARAGRAPHS: Final = frozenset(
    ("address", "article", "aside", "blockquote", "body", "caption", "dd", "details", "dialog", "div", "dl", "dt",
     "fieldset", "figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "legend",
     "main", "nav", "ol", "p", "pre", "section", "summary", "table", "ul")
)  # fmt: skip
LINES: Final = frozenset({"br", "li", "option", "tr"})
CELLS: Final = frozenset({"td", "th"})
DECLARED_WITHIN: Final = 1024  # bytes in which a page may declare its encoding
DECLARATION: Final = re.compile(
    rb"""(?:charset|<\?xml[^>]{0,100}encoding)\s{0,9}=\s{0,9}["']?([A-Za-z0-9_:.-]{1,40})"""
)
SPACES: Final = re.compile(r"[ \t\n\f\r]+")


def read_html(content: bytes, *, charset: str | None, max_characters: int) -> Extracted:
    page = _Page(max_characters)
    page.feed(decode(content, charset or _find_charset(content)))
    page.close()
    return Extracted(page.text())


def _find_charset(content: bytes) -> str | None:
    """Return the declared encoding. A declaration of UTF-16 that is readable as ASCII must be wrong, so ignore it."""
    found = DECLARATION.search(content[:DECLARED_WITHIN])
    charset = found[1].decode().lower() if found else ""
    return None if charset.startswith(("utf-16", "utf-32")) else charset or None


class _Page(HTMLParser):
    """Collects the words, and the space, line break or paragraph break between them."""

    def __init__(self, max_characters: int) -> None:
        super().__init__(convert_charrefs=True)
        self.max_characters = max_characters
        self.length = 0
        self.parts: list[str] = []
        self.gap = ""  # written before the next word
        self.title: list[str] = []
        self.hidden_by: str | None = None
        self.is_in_title = False
        self.pre_depth = 0

    def text(self) -> str:
        title = SPACES.sub(" ", "".join(self.title)).strip()
        body = "".join(self.parts).strip()
        return f"{title}\n\n{body}".strip() if title else body

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in HIDDEN:
            self.hidden_by = tag
        elif tag == "title" and not self.title:  # only the first one: pictures (svg) have titles too
            self.is_in_title = True
        elif tag == "img":
            self._add_flowing(dict(attrs).get("alt") or "")
        self.pre_depth += tag == "pre"
        self._widen_gap(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag == self.hidden_by:
            self.hidden_by = None
        elif tag == "title":
            self.is_in_title = False
        self.pre_depth -= tag == "pre" and self.pre_depth > 0
        self._widen_gap(tag)

    def handle_data(self, data: str) -> None:
        if self.hidden_by:
            return
        if self.is_in_title:
            self._count(data)
            self.title.append(data)
        elif self.pre_depth:
            self._add(data)
        else:
            self._add_flowing(data)

    def _add_flowing(self, data: str) -> None:
        """Add text outside `pre`: a run of white space becomes one space, or nothing next to a wider gap."""
        spaced = SPACES.sub(" ", data)
        if spaced.startswith(" "):
            self.gap = self.gap or " "
        if words := spaced.strip(" "):
            self._add(words)
            self.gap = " " if spaced.endswith(" ") else ""

    def _widen_gap(self, tag: str) -> None:
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
        if self.length > self.max_characters:
            raise TooMuchText(self.max_characters)
