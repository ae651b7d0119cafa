"""One world and one undisturbed run for all chaos tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chaos.headrace import headrace
from tests.chaos.world import make_world


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of all runs."""
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def undisturbed(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """The step records of a run in which nothing dies."""
    with headrace(tmp_path_factory.mktemp("undisturbed"), str(recipe)) as command:
        command.result()
        return command.steps()
