"""Replace `{name}` in texts with earlier outputs. Nothing else is replaced.

There are no attributes, indexes or formats: a name is only looked up among the outputs, so a text can reveal nothing
but them. Inserted text is not scanned again, so an output cannot refer to another one. `{{name}}` is written as
`{name}`; all other braces stay as they are, because prompts are full of JSON. A text that is nothing but `{name}`
becomes the output itself, not its text.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from outbox.canonical_json import MAX_BYTES
from tasks import Permanent

PLACE: Final = re.compile(r"\{\{([A-Za-z0-9_-]+)\}\}|\{([A-Za-z0-9_-]+)\}")


def fill(template: Any, known: Mapping[str, Any]) -> Any:
    """Fill a text, or the texts in lists and objects; return everything else unchanged."""
    match template:
        case str():
            whole = PLACE.fullmatch(template)
            return known[whole[2]] if whole and whole[2] is not None else fill_text(template, known)
        case list():
            return [fill(each, known) for each in template]
        case dict():
            return {name: fill(each, known) for name, each in template.items()}
        case _:
            return template


def fill_text(template: str, known: Mapping[str, Any]) -> str:
    return PLACE.sub(lambda place: f"{{{place[1]}}}" if place[2] is None else _text(known[place[2]]), template)


def check_size(template: Any, known: Mapping[str, Any]) -> None:
    """Raise Permanent if filling would exceed the limit: a short text may name a long output many times."""
    size = sum(times * len(_text(known[name])) for name, times in count_names(template).items())
    if size > MAX_BYTES:
        raise Permanent(
            f"The outputs named in the stage have {size:,} characters in total; the limit is {MAX_BYTES:,}."
        )


def count_names(template: Any) -> Counter[str]:
    """Return how often each name occurs."""
    match template:
        case str():
            return Counter(place[2] for place in PLACE.finditer(template) if place[2] is not None)
        case list():
            return sum(map(count_names, template), Counter[str]())
        case dict():
            return sum(map(count_names, template.values()), Counter[str]())
        case _:
            return Counter()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
