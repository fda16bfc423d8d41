"""Say on stderr why a command failed."""

from __future__ import annotations

import sys


def complain(sentence: str) -> None:
    print(f"manage.py: {sentence}", file=sys.stderr)
