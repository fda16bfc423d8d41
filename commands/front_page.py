"""Print `manage.py --help`: usage, options, and the list of commands.

It looks like the help of a single command, which typer prints. Typer loads a Markdown parser for that, and this page
would take twice the time.
"""

from __future__ import annotations

from typing import Any, Final

from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

# The styles of typer.
NAME: Final = "bold cyan"
SHORT_OPTION: Final = "bold green"
CODE: Final = "markdown.code"


def print_front_page(context: Any) -> None:
    """Print the help of the group of all commands."""
    root = context.command
    options, commands = _make_table(), _make_table()
    for option in root.get_params(context):
        long, short = (*sorted(option.opts, key=len, reverse=True), "")[:2]
        options.add_row(Text(long, NAME), Text(f"{short:<8}", SHORT_OPTION), option.help)
    for name, command in root.commands.items():
        commands.add_row(Text(name, NAME), _style_code(command.help))
    heading, space, usage = root.get_usage(context).partition(" ")
    console = Console(highlight=False, markup=False)
    console.print(Padding(Text.assemble((heading, "yellow"), space, usage), 1), style="bold")
    console.print(Padding(root.help, (0, 1, 1, 1)))
    console.print(Panel(options, title="Options", title_align="left", border_style="dim"))
    console.print(Panel(commands, title="Commands", title_align="left", border_style="dim"))
    console.print(Padding(root.epilog, 1))


def _make_table() -> Table:
    return Table(box=None, show_header=False, pad_edge=False, padding=(0, 1))


def _style_code(summary: str) -> Text:
    """Return the text with its parts in `backticks` styled, without the backticks."""
    parts = enumerate(summary.split("`"))
    return Text.assemble(*((part, CODE if place % 2 else "") for place, part in parts))
