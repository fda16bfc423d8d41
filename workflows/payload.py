"""The payload of a workflow, and every limit that it has.

{"workflowId": "order 17", "input": {…}, "stages": [
    {"name": "fetch", "kind": "http", "destination": "crm", "body": {"order": "{input}"}},
    {"name": "summarize", "kind": "llm", "model": "small", "prompt": "In one sentence: {fetch}"},
    {"name": "store", "kind": "python", "function": "store_summary"}]}
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.alias_generators import to_camel

from models.errors import Misuse
from workflows.templates import names_in

TYPE: Final = "workflow.execute"
MOST_STAGES: Final = 50
MOST_MESSAGES: Final = 100
TEXT_LIMIT: Final = 100_000  # of a prompt
LONGEST_SECONDS: Final = 300.0  # that one request may take
OF_THE_REQUEST: Final = {"model", "messages", "stream", "n"}  # no option may change them
# A key goes into a header: printable ASCII, no space at its ends.
WORKFLOW_ID: Final = re.compile(r"[!-~]([ -~]{0,198}[!-~])?")
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
NO_OBJECT: Final = "model_type"  # as pydantic calls it

Text = Annotated[str, Field(min_length=1, max_length=TEXT_LIMIT)]


class BadWorkflow(Misuse):
    """The workflow cannot be run as it is written."""

    code = "bad_workflow"


class _Json(BaseModel):
    model_config = ConfigDict(
        alias_generator=to_camel, validate_by_alias=True, validate_by_name=False, extra="forbid", frozen=True
    )


class _Stage(_Json):
    name: str

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, given: str) -> str:
        if not NAME.fullmatch(given):
            raise ValueError("it is letters, digits, _ and -, at most 100")
        return given

    def templates(self) -> Any:
        """Where earlier outputs are put in."""
        return None


class PythonStage(_Stage):
    """Calls a function that is registered under this name. A payload never names code by its place."""

    kind: Literal["python"]
    function: Annotated[str, Field(min_length=1, max_length=100)]


class HttpStage(_Stage):
    """Sends a POST to a destination of OUTBOX_DESTINATIONS; the answer is the output."""

    kind: Literal["http"]
    destination: Annotated[str, Field(min_length=1, max_length=200)]
    body: Any = None  # not given: everything that is known
    timeout_seconds: Annotated[float, Field(gt=0, le=LONGEST_SECONDS, allow_inf_nan=False)] = 30.0

    def templates(self) -> Any:
        return self.body


class Message(_Json):
    role: Literal["system", "user", "assistant"]
    content: Text


class LlmStage(_Stage):
    """Asks a language model; what it says is the output."""

    kind: Literal["llm"]
    model: Annotated[str, Field(min_length=1, max_length=200)]
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)] | None = None
    options: dict[str, Any] = Field(default_factory=dict)  # temperature, max_tokens, …: as the model's API names them
    timeout_seconds: Annotated[float, Field(gt=0, le=LONGEST_SECONDS, allow_inf_nan=False)] = 120.0

    @field_validator("options")
    @classmethod
    def _options_are_options(cls, given: dict[str, Any]) -> dict[str, Any]:
        if taken := OF_THE_REQUEST & given.keys():
            raise ValueError(f"{min(taken)!r} is not an option")
        return given

    @model_validator(mode="after")
    def _one_question(self) -> LlmStage:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("a question is either `prompt` or `messages`")
        return self

    @property
    def question(self) -> list[dict[str, str]]:
        asked = self.messages or [Message(role="user", content=self.prompt or "")]
        return [message.model_dump() for message in asked]

    def templates(self) -> Any:
        return self.question


Stage = PythonStage | HttpStage | LlmStage


class Workflow(_Json):
    """What is to be done, in this order."""

    workflow_id: str | None = None  # None: the id of its task
    input: Any = None
    stages: Annotated[list[Annotated[Stage, Field(discriminator="kind")]], Field(min_length=1, max_length=MOST_STAGES)]

    @field_validator("workflow_id")
    @classmethod
    def _fits_into_a_header(cls, given: str | None) -> str | None:
        if given is not None and not WORKFLOW_ID.fullmatch(given):
            raise ValueError("it is 1 to 200 printable ASCII characters, without a space at its ends")
        return given

    @model_validator(mode="after")
    def _names_tell_stages_apart(self) -> Workflow:
        known = {"input"}
        for stage in self.stages:
            if stage.name in known:
                said = "is the input of all" if stage.name == "input" else "has been there already"
                raise ValueError(f"the name {stage.name!r} {said}: each stage has a name of its own")
            if unknown := names_in(stage.templates()).keys() - known:
                raise ValueError(
                    f"the stage {stage.name!r} names {{{min(unknown)}}}, and no stage before it is called so; "
                    "{{…}} are braces that stay"
                )
            known.add(stage.name)
        return self


def parsed(payload: Any) -> Workflow:
    """Raises BadWorkflow, in a sentence that does not repeat what was given but for names."""
    try:
        return Workflow.model_validate(payload)
    except ValidationError as error:
        raise BadWorkflow(f"The workflow cannot be run: {_said(error)}.") from None
    except RecursionError:
        raise BadWorkflow("The workflow cannot be run: it is nested too deeply.") from None


def _said(error: ValidationError) -> str:
    first = error.errors(include_input=False, include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"] if part not in ("python", "http", "llm"))
    if first["type"] == NO_OBJECT and not place:
        return "it is an object with stages"
    said = first["msg"].removeprefix("Value error, ")
    said = f"{said[0].lower()}{said[1:]}".rstrip(".")
    return f"{place}: {said}" if place else said
