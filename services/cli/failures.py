"""Exceptions into one line and an exit status: 2 when the user's input is wrong, 1 otherwise.

A fault that is nobody's declared error keeps its traceback: hiding it would help nobody.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from services.recipe import RecipeError
from services.runtime.errors import HeadraceError, InvalidInput, NotFound

BAD_INPUT = 2
FAILED = 1


class Explained(NamedTuple):
    """The line for stderr and the exit status."""

    line: str
    status: int


def explain(exc: Exception) -> Explained | None:
    """How ``exc`` is told; None when it is no declared error."""
    if _is_usage(exc):
        return _usage(exc)
    if isinstance(exc, RecipeError):
        return Explained(one_line(str(exc)), BAD_INPUT)
    if isinstance(exc, HeadraceError):
        bad_input = isinstance(exc, InvalidInput | NotFound)
        return Explained(one_line(str(exc)), BAD_INPUT if bad_input else FAILED)
    return None


def _is_usage(exc: Any) -> bool:
    # By shape: the class that Typer raises for a wrong command line moved between its releases.
    return hasattr(exc, "format_message") and hasattr(exc, "ctx")


def _usage(exc: Any) -> Explained:
    if type(exc).__name__ == "NoArgsIsHelpError":
        return Explained("", BAD_INPUT)  # the help has been shown, which says it all
    command = exc.ctx.command_path if exc.ctx is not None else "headrace"
    text = one_line(exc.format_message()).rstrip(".")
    return Explained(f"{text}. See `{command} --help`.", BAD_INPUT)


def one_line(text: str) -> str:
    """``text`` without line breaks."""
    return " ".join(text.split())
