"""Processes that die by SIGKILL in the middle of a run; ``tests/chaos`` kills every kind of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.chaos.checks import check_complete, check_same_steps, check_trains
from tests.chaos.headrace import headrace, wait_gone
from tests.chaos.world import make_world

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]
GONE_WITHIN = 10.0
KILL_AFTER = 6
"""Two steps after a checkpoint: what is lost must be trained again."""


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe whose random model has something to learn from its first step on."""
    return make_world(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="module")
def undisturbed(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """The step records of a run in which nothing dies."""
    with headrace(tmp_path_factory.mktemp("undisturbed"), str(digits)) as command:
        check_complete(command, command.result())
        check_trains(command.steps())
        return command.steps()


def test_gym_engine_and_trainer_die_in_one_run(
    digits: Path, undisturbed: dict[int, dict[str, Any]], tmp_path: Path
) -> None:
    with headrace(tmp_path, str(digits)) as command:
        command.wait_for_step(1)
        command.kill_while("claimed", lambda: command.service("gym"))
        command.wait_for_step(3)
        command.kill_while("claimed", command.engine_core)
        command.wait_for_step(KILL_AFTER)
        command.kill_while("leased", command.trainer_rank)
        summary = command.result()
        assert summary["incarnation"] == 1
        assert command.redeliveries() > 0
        check_complete(command, summary)
        check_same_steps(command.steps(), undisturbed)


def test_a_killed_command_leaves_nothing_behind_and_resumes_to_the_same_steps(
    digits: Path, undisturbed: dict[int, dict[str, Any]], tmp_path: Path
) -> None:
    with headrace(tmp_path, str(digits)) as command:
        command.wait_for_step(KILL_AFTER)
        assert wait_gone(command.kill(), GONE_WITHIN) == []
        assert command.processes() == []
    with headrace(tmp_path, "--resume", "last") as command:
        summary = command.result()
        assert summary["incarnation"] == 1
        check_complete(command, summary)
        check_same_steps(command.steps(), undisturbed)
