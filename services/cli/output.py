"""Where output goes: what people read about progress to stderr, results to stdout."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console

WIDE = 200


def say(text: str) -> None:
    """One line for people."""
    print(text, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """The one JSON value of a ``--json`` command."""
    print(json.dumps(value, default=str), flush=True)


def console() -> Console:
    """For tables on stdout; wide where no terminal sets a width, so that nothing is cut in a log."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)
