"""Earlier outputs in texts: `{name}` is replaced, and nothing else is.

No attribute, no index, no format: a name is looked up among the outputs, so a text can show nothing but them. What is
put in is not looked at again, so an output cannot name another one. `{{name}}` stays, as `{name}`; all other braces
stay as they are, since prompts are full of JSON. A text that is nothing but `{name}` becomes the output itself, not its
text.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from outbox.canonical import MAX_BYTES
from tasks.core.outcomes import Permanent

PLACE: Final = re.compile(r"\{\{([A-Za-z0-9_-]+)\}\}|\{([A-Za-z0-9_-]+)\}")


def filled(template: Any, known: Mapping[str, Any]) -> Any:
    """A text, or texts in lists and objects; everything else as it is."""
    match template:
        case str():
            whole = PLACE.fullmatch(template)
            return known[whole[2]] if whole and whole[2] is not None else filled_text(template, known)
        case list():
            return [filled(each, known) for each in template]
        case dict():
            return {name: filled(each, known) for name, each in template.items()}
        case _:
            return template


def filled_text(template: str, known: Mapping[str, Any]) -> str:
    return PLACE.sub(lambda place: f"{{{place[1]}}}" if place[2] is None else _text(known[place[2]]), template)


def check_size(template: Any, known: Mapping[str, Any]) -> None:
    """Before anything is put in: a short text that names a long output many times would fill the memory."""
    size = sum(times * len(_text(known[name])) for name, times in names_in(template).items())
    if size > MAX_BYTES:
        raise Permanent(f"The outputs that it names have {size:,} characters together, and {MAX_BYTES:,} is the most.")


def names_in(template: Any) -> Counter[str]:
    """What it wants to know, and how often."""
    match template:
        case str():
            return Counter(place[2] for place in PLACE.finditer(template) if place[2] is not None)
        case list():
            return sum(map(names_in, template), Counter[str]())
        case dict():
            return sum(map(names_in, template.values()), Counter[str]())
        case _:
            return Counter()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
