"""A tensor that the trainer left out of what it staged blocks the commit and is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.command import Home
from tests.e2e.faults import check_blocked, failed_run

pytest.importorskip("vllm")
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_missing_tensor_ends_the_run(recipe: Path, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    name = "model.layers.0.mlp.down_proj.weight"
    check_blocked(home, failed_run(recipe, home, f"omit:{name}@1"), name)
