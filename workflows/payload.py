"""The payload of a workflow, and its limits.

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
from workflows.templates import count_names

TYPE: Final = "workflow.execute"
MAX_STAGES: Final = 50
MAX_MESSAGES: Final = 100
MAX_PROMPT: Final = 100_000  # characters
MAX_SECONDS: Final = 300.0  # of one request
RESERVED_OPTIONS: Final = {"model", "messages", "stream", "n"}  # set by us
# It is part of a key, which is sent in a header: printable ASCII, no space at either end.
WORKFLOW_ID: Final = re.compile(r"[!-~]([ -~]{0,198}[!-~])?")
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
NOT_AN_OBJECT: Final = ("model_type", "model_attributes_type")  # error types of pydantic

Text = Annotated[str, Field(min_length=1, max_length=MAX_PROMPT)]


class BadWorkflow(Misuse):
    """The workflow is invalid.

    A stage is missing or misspelt, or names an unknown function, destination or earlier stage.
    """

    code = "bad_workflow"
    remedy = "Correct the part that the message names; docs/workflows.md describes all fields."


class _Json(BaseModel):
    model_config = ConfigDict(
        alias_generator=to_camel, validate_by_alias=True, validate_by_name=False, extra="forbid", frozen=True
    )


class _Stage(_Json):
    name: str

    @field_validator("name")
    @classmethod
    def _check_name(cls, given: str) -> str:
        if not NAME.fullmatch(given):
            raise ValueError("use 1 to 100 letters, digits, _ and -, beginning with a letter or digit")
        return given

    def templates(self) -> Any:
        """Return the part of the stage in which names are replaced by earlier outputs."""
        return None


class PythonStage(_Stage):
    """Calls a function that is registered under this name. A payload cannot name a module or a path."""

    kind: Literal["python"]
    function: Annotated[str, Field(min_length=1, max_length=100)]


class HttpStage(_Stage):
    """POSTs to a destination named in OUTBOX_DESTINATIONS; the answer is the output."""

    kind: Literal["http"]
    destination: Annotated[str, Field(min_length=1, max_length=200)]
    body: Any = None  # if not given: workflow id, stage, input and outputs
    timeout_seconds: Annotated[float, Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False)] = 30.0

    def templates(self) -> Any:
        return self.body


class Message(_Json):
    role: Literal["system", "user", "assistant"]
    content: Text


class LlmStage(_Stage):
    """Sends messages to a language model; its reply is the output."""

    kind: Literal["llm"]
    model: Annotated[str, Field(min_length=1, max_length=200)]
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    options: dict[str, Any] = Field(default_factory=dict)  # temperature, max_tokens, …, as the API names them
    timeout_seconds: Annotated[float, Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False)] = 120.0

    @field_validator("options")
    @classmethod
    def _check_options(cls, given: dict[str, Any]) -> dict[str, Any]:
        if taken := RESERVED_OPTIONS & given.keys():
            raise ValueError(f"{min(taken)!r} cannot be set here")
        return given

    @model_validator(mode="after")
    def _check_messages(self) -> LlmStage:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either `prompt` or `messages`")
        return self

    @property
    def conversation(self) -> list[dict[str, str]]:
        messages = self.messages or [Message(role="user", content=self.prompt or "")]
        return [message.model_dump() for message in messages]

    def templates(self) -> Any:
        return self.conversation


Stage = PythonStage | HttpStage | LlmStage


class Workflow(_Json):
    """The stages of a workflow, in order, and its input."""

    workflow_id: str | None = None  # if not given: the id of the task
    input: Any = None
    stages: Annotated[list[Annotated[Stage, Field(discriminator="kind")]], Field(min_length=1, max_length=MAX_STAGES)]

    @field_validator("workflow_id")
    @classmethod
    def _check_workflow_id(cls, given: str | None) -> str | None:
        if given is not None and not WORKFLOW_ID.fullmatch(given):
            raise ValueError("use 1 to 200 printable ASCII characters, without a space at either end")
        return given

    @model_validator(mode="after")
    def _check_stage_names(self) -> Workflow:
        known = {"input"}
        for stage in self.stages:
            if stage.name in known:
                reason = "is reserved" if stage.name == "input" else "occurs twice"
                raise ValueError(f"the stage name {stage.name!r} {reason}")
            if unknown := count_names(stage.templates()).keys() - known:
                raise ValueError(
                    f"the stage {stage.name!r} uses {{{min(unknown)}}}, but no earlier stage has that name; "
                    "write {{…}} for literal braces"
                )
            known.add(stage.name)
        return self


def parse(payload: Any) -> Workflow:
    """Return the workflow, or raise BadWorkflow. The message repeats names from the payload, never other values."""
    try:
        return Workflow.model_validate(payload)
    except ValidationError as error:
        raise BadWorkflow(f"The workflow is invalid: {_describe(error)}.") from None
    except RecursionError:
        raise BadWorkflow("The workflow is invalid: it is nested too deeply.") from None


def _describe(error: ValidationError) -> str:
    first = error.errors(include_input=False, include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"] if part not in ("python", "http", "llm"))
    if first["type"] in NOT_AN_OBJECT:
        return f"`{place}` must be an object" if place else "it must be an object with `stages`"
    if first["type"] == "missing":
        return f"`{place}` is required"
    message = first["msg"].removeprefix("Value error, ")
    message = f"{message[0].lower()}{message[1:]}".rstrip(".")
    return f"`{place}`: {message}" if place else message
