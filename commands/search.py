"""search: documents by their words."""

from __future__ import annotations

import re
from typing import Annotated

import typer
from rich.text import Text

from commands.output import camel, console, print_json
from commands.plain_lines import plain


def register(app: typer.Typer) -> None:
    app.command()(search)


def search(
    words: Annotated[list[str], typer.Argument(metavar="WORDS", help='Words, "a phrase", or, -without.')],
    limit: Annotated[int, typer.Option(min=1, max=100, help="At most so many.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Search the documents, the best places first.

    Example: `manage.py search lease token`
    """
    import documents  # noqa: PLC0415
    from models.engine import engine  # noqa: PLC0415 - loads SQLAlchemy

    with engine().connect() as connection:
        hits = documents.search(connection, " ".join(words), limit=limit)
    if as_json:
        print_json([camel(hit) for hit in hits])
        return
    for hit in hits:
        console.print(Text.assemble((plain(hit.name), "bold"), f"  {hit.rank:.3f}"))
        console.print(_highlighted(plain(hit.highlight)))
        console.print()
    console.print(f"{len(hits)} place{'s' if len(hits) > 1 else ''}" if hits else "Nothing was found.")


def _highlighted(found: str) -> Text:
    """Bold between the brackets, which stay: what is copied or piped shows them too."""
    shown = Text()
    for part in re.split("(⟦[^⟧]*⟧)", found):
        shown.append(part, style="bold yellow" if part.startswith("⟦") else "")
    return shown
