"""Exceptions into one line and an exit status: 2 when the user's input is wrong, 1 otherwise.

A fault that is nobody's declared error keeps its traceback: hiding it would help nobody.
"""

from __future__ import annotations

from typing import NamedTuple

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
    if isinstance(exc, RecipeError):
        return Explained(one_line(str(exc)), BAD_INPUT)
    if isinstance(exc, HeadraceError):
        bad_input = isinstance(exc, InvalidInput | NotFound)
        return Explained(one_line(str(exc)), BAD_INPUT if bad_input else FAILED)
    return None


def one_line(text: str) -> str:
    """``text`` without line breaks."""
    return " ".join(text.split())
