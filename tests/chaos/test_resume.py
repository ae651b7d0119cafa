"""The whole command is killed and resumed; again and again, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chaos.checks import check_complete, check_same_steps
from tests.chaos.headrace import headrace, wait_gone

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]
GONE_WITHIN = 10.0


@pytest.mark.parametrize("after", [1, 6, 9])
def test_resumed_run_equals_the_undisturbed_one(
    after: int, recipe: Path, tmp_path: Path, undisturbed: dict[int, dict[str, Any]]
) -> None:
    """Killed before the first checkpoint, between two, and right after one."""
    with headrace(tmp_path, str(recipe)) as command:
        command.wait_for_step(after)
        assert wait_gone(command.kill(), GONE_WITHIN) == []
        assert command.processes() == []
    with headrace(tmp_path, "--resume", "last") as command:
        summary = command.result()
        assert summary["incarnation"] == 1
        check_complete(command, summary)
        check_same_steps(command.steps(), undisturbed)


def test_killed_in_every_phase_of_a_life(
    recipe: Path, tmp_path: Path, undisturbed: dict[int, dict[str, Any]]
) -> None:
    """Before the run is submitted, while it validates, while it trains, and while it recovers."""
    with headrace(tmp_path, str(recipe)) as command:
        command.wait_for(lambda: bool(list((tmp_path / "runs").glob("*/recipe.yaml"))))
        assert wait_gone(command.kill(), GONE_WITHIN) == []
    for line in ("validation", "running", "starting services"):
        with headrace(tmp_path, "--resume", "last") as command:
            command.wait_for_line(line)
            assert wait_gone(command.kill(), GONE_WITHIN) == []
            assert command.processes() == []
    with headrace(tmp_path, "--resume", "last") as command:
        check_complete(command, command.result())
        check_same_steps(command.steps(), undisturbed)
