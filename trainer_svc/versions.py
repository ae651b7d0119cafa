"""A weight version as the trainer counts it."""

from __future__ import annotations

from typing import NamedTuple

UNKNOWN = -1


class Version(NamedTuple):
    """``number`` steps were trained in the life ``incarnation`` of the run; only both together identify."""

    incarnation: int
    number: int
