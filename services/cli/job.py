"""A run that has passed every check and is about to start."""

from __future__ import annotations

from dataclasses import dataclass

from services.recipe import LoadedRecipe
from services.runtime.home import Home, RunPaths
from services.runtime.ports import ReservedPort


@dataclass(frozen=True, slots=True)
class Job:
    """What a session needs; ``ports`` are held by process name."""

    loaded: LoadedRecipe
    home: Home
    paths: RunPaths
    ports: dict[str, ReservedPort]
