"""The language of the search box: what people type, as terms; and the terms, as a filter of the ledger.

    type:document.ingest status:dead error:timeout since:2h text:"no such file"

A query is a list of terms, in any order, and all of them must be true. A value with spaces or quotes is written in
double quotes, in which a backslash makes the next character literal. Words without a name are one phrase, which is
understood as the first of these that fits: a status, a type that is known, ids, the idempotency key of a task that
exists, a part of an error message.

Reading and writing are each other's inverse: `parse(str(query)) == query`.

Error messages are for operators (`api/visible_errors.py`). Finding a task by a part of its message says what is in the
message, so `require_visible` refuses that to all other tokens.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final
from urllib.parse import urlencode

from sqlalchemy import Connection

from api.tokens import Forbidden, Scope, Token
from console.door import PREFIX
from models.errors import Misuse
from models.status import TaskStatus, parse_task_status
from tasks.core.outcomes import ErrorCode
from tasks.operations.listing import TaskFilter
from tasks.operations.task_search import ids_with_key, known_types

TASKS: Final = f"{PREFIX}/tasks"
LONGEST: Final = 2000  # characters
WITH_ERRORS: Final = frozenset({TaskStatus.DEAD, TaskStatus.RETRYING})


class Name(StrEnum):
    """The names of terms. The phrase of words without a name has none."""

    PHRASE = ""
    STATUS = "status"
    TYPE = "type"
    QUEUE = "queue"
    ID = "id"
    KEY = "key"
    PARTITION = "partition"
    ERROR = "error"
    FINGERPRINT = "fingerprint"
    TEXT = "text"
    SINCE = "since"
    UNTIL = "until"


KNOWN: Final = ", ".join(f"{name}:" for name in Name if name)
ABOUT_ERRORS: Final = (Name.ERROR, Name.FINGERPRINT, Name.TEXT)
# The name is possessive: without a value after it, `type:"x` must not be read as a word.
_TERM: Final = re.compile(
    r"""(?:(?P<name>\w+):)?+(?:"(?P<quoted>(?:[^"\\]|\\.)*)"(?=\s|\Z)|(?P<plain>[^\s"]\S*)|(?=\s|\Z))""", re.DOTALL
)
_ESCAPED: Final = re.compile(r"\\(.)", re.DOTALL)
_SPECIAL: Final = re.compile(r'(["\\])')
_PLAIN: Final = re.compile(r'[^\s"]\S*')
_CONTROL: Final = re.compile(r"[\x00-\x08\x0e-\x1f\x7f]|[\ud800-\udfff]")
_AGE: Final = re.compile(r"(\d{1,6})([smhd])")
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_UUID: Final = re.compile(r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}")


@dataclass(frozen=True, slots=True)
class Term:
    """One condition of a query."""

    name: Name
    value: str

    def __str__(self) -> str:
        before = f"{self.name}:" if self.name else ""
        is_plain = _PLAIN.fullmatch(self.value) and (self.name or ":" not in self.value)
        return before + (self.value if is_plain else '"' + _SPECIAL.sub(r"\\\1", self.value) + '"')


@dataclass(frozen=True, slots=True)
class Query:
    """Terms that must all be true. Without any, every task matches."""

    terms: tuple[Term, ...] = ()

    def __str__(self) -> str:
        return " ".join(map(str, self.terms))

    def get(self, name: Name) -> str | None:
        return next((term.value for term in self.terms if term.name == name), None)

    def without(self, *names: Name) -> Query:
        return Query(tuple(term for term in self.terms if term.name not in names))

    def replacing(self, name: Name, value: str | None) -> Query:
        """Return the query with another value of a term, or without it."""
        rest = self.without(name).terms
        return Query((*rest, Term(name, value))) if value else Query(rest)

    @property
    def statuses(self) -> frozenset[TaskStatus]:
        """Return the statuses that it chooses; empty: all. Errors belong to tasks that are dead or retrying."""
        if given := self.get(Name.STATUS):
            return frozenset(map(parse_task_status, given.split(",")))
        is_about_errors = any(term.name in ABOUT_ERRORS for term in self.terms)
        return WITH_ERRORS if is_about_errors else frozenset()


def parse(text: str) -> Query:
    """Return the terms of a query. Raises Misuse with a sentence for the page."""
    _check_length(text)
    if _CONTROL.search(text):
        raise Misuse("The search has a character that cannot be written, such as NUL.")
    terms: dict[Name, str] = {}
    for name, value in _read(text):
        if name in terms and name not in (Name.PHRASE, Name.STATUS, Name.ID):
            raise Misuse(f"{name}: is given twice. A task has only one.")
        between = "," if name else " "
        terms[name] = f"{terms[name]}{between}{value}" if name in terms else value
    query = Query(tuple(Term(name, _normal(name, value)) for name, value in terms.items()))
    _check(query)
    return query


def tasks_path(**terms: str) -> str:
    """Return the address of the search for tasks with these terms, such as `type="mail.send", status="dead"`."""
    return f"{TASKS}?{urlencode({'q': str(Query(tuple(Term(Name(name), value) for name, value in terms.items())))})}"


def only_id(text: str) -> uuid.UUID | None:
    """Return the id, if the query is the id of a task and nothing else."""
    return uuid.UUID(text.strip()) if _UUID.fullmatch(text.strip()) else None


def understand(connection: Connection, query: Query) -> Query:
    """Return the query with a name for its phrase, at the same place."""
    phrase = query.get(Name.PHRASE)
    if phrase is None:
        return query
    name = _name_of(connection, query, phrase)
    value = _normal(name, ",".join(_words(phrase)) if name is Name.ID else phrase)
    named = Query(tuple(Term(name, value) if term.name is Name.PHRASE else term for term in query.terms))
    _check(named)
    return named


def require_visible(query: Query, token: Token) -> None:
    """Raise Forbidden if the tasks that match would tell the token what it may not read in error messages."""
    if query.get(Name.TEXT) is not None and not token.has_scope(Scope.OPERATE):
        raise Forbidden(
            f"The token {token.name} lacks the scope {Scope.OPERATE}, which searching in error messages (text:) needs."
        )


def filter_of(connection: Connection, query: Query, *, at: datetime) -> TaskFilter:
    """Return what the query chooses. Ages such as `2h` count back from `at`."""
    since, until = (query.get(name) for name in (Name.SINCE, Name.UNTIL))
    type_, key, ids = query.get(Name.TYPE), query.get(Name.KEY), query.get(Name.ID)
    chosen = {uuid.UUID(each) for each in ids.split(",")} if ids else None
    if key is not None:
        found = set(ids_with_key(connection, key, [type_] if type_ else known_types(connection)))
        chosen = found if chosen is None else chosen & found
    start, end = _time(Name.SINCE, since, at) if since else None, _time(Name.UNTIL, until, at) if until else None
    if start and end and start >= end:
        raise Misuse("since: is not before until:, so no task can match.")
    return TaskFilter(
        query.statuses,
        type_,
        query.get(Name.QUEUE),
        since=start,
        until=end,
        error_code=query.get(Name.ERROR),
        ids=None if chosen is None else sorted(chosen),
        partition_key=query.get(Name.PARTITION),
        error_fingerprint=query.get(Name.FINGERPRINT),
        error_text=query.get(Name.TEXT),
    )


def _read(text: str) -> list[tuple[Name, str]]:
    found, place = [], 0
    while rest := text[place:].lstrip():
        place = len(text) - len(rest)
        term = _TERM.match(text, place)
        if term is None or term.end() == place:
            raise Misuse('A quote is not closed, or something follows it without a space: write text:"two words".')
        name, quoted, plain = term.group("name", "quoted", "plain")
        value = _ESCAPED.sub(r"\1", quoted) if quoted is not None else plain or ""
        if name is not None and name.lower() not in list(Name):
            quote = "Put words with a colon in quotes to search for them as they are."
            raise Misuse(f"There is no term {name[:40]}:, only {KNOWN}. {quote}")
        if not value:
            raise Misuse(f"{name.lower()}: needs a value." if name else "There is nothing between the quotes.")
        found.append((Name(name.lower()) if name else Name.PHRASE, value))
        place = term.end()
    return found


def _normal(name: Name, value: str) -> str:
    """Return the value as it is written: a status under its own name, each one once."""
    if name is Name.STATUS:
        given = value.split(",")
        try:
            statuses = {parse_task_status(each.strip()) for each in given if each.strip()}
        except ValueError as error:
            raise Misuse(f"{error}.") from None
        return ",".join(str(status).lower() for status in TaskStatus if status in statuses)
    if name is Name.ID:
        ids = list(dict.fromkeys(each.strip().lower() for each in value.split(",") if each.strip()))
        if wrong := next((each for each in ids if not _UUID.fullmatch(each)), None):
            raise Misuse(f"{wrong[:60]!r} is not the id of a task.")
        return ",".join(ids)
    return value.lower() if name is Name.ERROR else value


def _check(query: Query) -> None:
    """Raise Misuse if a value cannot be used, or if the query is too long to be written in an address."""
    _check_length(str(query))
    for name in (Name.STATUS, Name.ID):
        if query.get(name) == "":
            raise Misuse(f"{name}: needs a value.")
    code = query.get(Name.ERROR)
    if code is not None and code not in list(ErrorCode):
        raise Misuse(f"There is no error code {code[:60]!r}. Known: {', '.join(ErrorCode)}. For its words: text:.")
    for name in (Name.SINCE, Name.UNTIL):
        if given := query.get(name):
            _time(name, given, datetime.now(UTC))


def _check_length(text: str) -> None:
    if len(text) > LONGEST:
        raise Misuse(f"The search has {len(text):,} characters; {LONGEST:,} are allowed.")


def _time(name: Name, given: str, at: datetime) -> datetime:
    age = _AGE.fullmatch(given)
    try:
        if age:
            return at - timedelta(**{_UNITS[age[2]]: int(age[1])})
        found = datetime.fromisoformat(re.sub(" UTC$", "+00:00", given))
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        raise Misuse(
            f"{name}: takes an age such as 90s, 2h or 3d, or a time such as 2026-11-16T10:30 (UTC), not {given[:40]!r}."
        ) from None


def _name_of(connection: Connection, query: Query, phrase: str) -> Name:
    """Return what a phrase means."""
    is_free = {name: query.get(name) is None for name in Name}
    if is_free[Name.STATUS] and _is_status(phrase):
        return Name.STATUS
    types = known_types(connection)
    if is_free[Name.TYPE] and phrase in types:
        return Name.TYPE
    if is_free[Name.ID] and all(map(_UUID.fullmatch, _words(phrase))):
        return Name.ID
    given_type = query.get(Name.TYPE)
    if is_free[Name.KEY] and ids_with_key(connection, phrase, [given_type] if given_type else types):
        return Name.KEY
    if is_free[Name.TEXT]:
        return Name.TEXT
    raise Misuse(f"{phrase[:60]!r} has no name, and text: is given already. Known: {KNOWN}.")


def _words(phrase: str) -> list[str]:
    """Return what spaces or commas separate; at least one word."""
    return re.split(r"[\s,]+", phrase.strip(" ,"))


def _is_status(word: str) -> bool:
    try:
        return bool(parse_task_status(word))
    except ValueError:
        return False
