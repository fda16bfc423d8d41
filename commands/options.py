"""Options and arguments that several commands share."""

from __future__ import annotations

import uuid
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
TaskId = Annotated[uuid.UUID, typer.Argument(metavar="ID", help="The id of the task.")]
Type = Annotated[str | None, typer.Option("--type", help="Only tasks of this type.")]
Queue = Annotated[str | None, typer.Option(help="Only tasks of this queue.")]
Destination = Annotated[str | None, typer.Option(help="Only events for this destination.")]
Reason = Annotated[str | None, typer.Option(help="Reason to record together with your name.")]
