#!/usr/bin/env python3
"""The command line of Celeriac. A Python without our packages restarts itself with the one in .venv."""

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def _continue_in_venv() -> None:
    python = ROOT / ".venv" / "bin" / "python"
    complete = sys.prefix != sys.base_prefix and importlib.util.find_spec("typer") is not None
    if not complete and python.exists() and Path(sys.prefix) != ROOT / ".venv":
        os.execv(python, [str(python), *sys.argv])  # noqa: S606 - the same command, the project's Python


if __name__ == "__main__":
    _continue_in_venv()
    try:
        from commands import main

        code = main()
    except ModuleNotFoundError as error:
        sys.exit(f"manage.py: {error.name} is not installed: run `make up` once, which installs everything into .venv.")
    sys.exit(code)
