"""Weights that do not arrive as they were trained block the commit; the run ends and names the tensor."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.world import make_world
from tests.e2e.command import Home
from tests.e2e.faults import check_blocked, failed_run

pytest.importorskip("vllm")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def fault_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose first batch has a gradient, so that the next version has other weights."""
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize(
    ("fault", "tensor"),
    [
        ("corrupt:model.layers.1.mlp.up_proj.weight@1", "model.layers.1.mlp.up_proj.weight"),
        ("stale:lm_head@1", "lm_head.weight"),
    ],
)
def test_damaged_weights_end_the_run(fault_recipe: Path, tmp_path: Path, fault: str, tensor: str) -> None:
    home = Home(tmp_path / "home")
    check_blocked(home, failed_run(fault_recipe, home, fault), tensor)
