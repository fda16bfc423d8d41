"""Parameters and JSON bodies of routes: their types, and how a body is parsed, whatever its Content-Type."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, StringConstraints, ValidationError
from pydantic.alias_generators import to_camel

from models.errors import Misuse
from models.status import TaskStatus, parse_task_status
from tasks.operations.listing import Cursor
from tasks.submission.json_lines import describe_invalid, read_json

Model = TypeVar("Model", bound=BaseModel)


class JsonBody(BaseModel):
    """A body with camelCase names. Unknown fields are rejected: a misspelt filter would choose too much."""

    model_config = ConfigDict(
        alias_generator=to_camel, validate_by_alias=True, validate_by_name=False, extra="forbid", frozen=True
    )


def read_body(raw: bytes, model: type[Model]) -> Model:
    """Parse a JSON body, or raise Misuse. An empty body is an empty object."""
    given: Any = read_json(raw) if raw else {}
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise Misuse(f"The body is invalid: {describe_invalid(error.errors())}.") from None


def encode_cursor(cursor: Cursor) -> str:
    """Return a cursor as clients get it: text without a meaning for them."""
    return base64.urlsafe_b64encode(str(cursor).encode()).decode().rstrip("=")


def decode_cursor(given: str) -> Cursor:
    """Return the cursor, or raise Misuse."""
    try:
        return Cursor.parse(base64.urlsafe_b64decode(f"{given}{'=' * (-len(given) % 4)}").decode())
    except (Misuse, ValueError, binascii.Error):
        raise Misuse("`cursor` is not a cursor; send the `nextCursor` of the previous page unchanged.") from None


def _check_text(given: str) -> str:
    if not given.isprintable():
        raise ValueError("it has a line break or another character that cannot be printed")
    return given


# PostgreSQL cannot store NUL, and UTF-8 has no unpaired surrogates; neither can be printed.
Text = Annotated[str, StringConstraints(min_length=1, max_length=200), AfterValidator(_check_text)]
Sentence = Annotated[str, StringConstraints(min_length=1, max_length=500), AfterValidator(_check_text)]
Status = Annotated[TaskStatus, BeforeValidator(parse_task_status)]
