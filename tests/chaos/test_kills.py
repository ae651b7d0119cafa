"""Each process of the stack is killed once in the middle of a run; the run equals one that was left alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.chaos.checks import check_complete, check_same_steps, check_trains
from tests.chaos.headrace import Headrace, headrace, wait_gone

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]
KILL_AFTER = 6  # no checkpoint is due there

VICTIMS: dict[str, Callable[[Headrace], psutil.Process]] = {
    "gym": lambda command: command.service("gym"),
    "controller": lambda command: command.service("controller"),
    "buffer": lambda command: command.service("buffer"),
    "reward": lambda command: command.service("reward"),
    "rollout": lambda command: command.service("rollout"),
    "refit": lambda command: command.service("refit"),
    "engine_host": lambda command: command.service("engine"),
    "engine_worker": lambda command: command.engine_worker(),
    "engine_core": lambda command: command.engine_core(),
    "trainer_rank": lambda command: command.trainer_rank(),
    "trainer_launcher": lambda command: command.service("trainer"),
    "redis_keeper": lambda command: command.redis_keeper(),
}
# While samples are generated (claimed) and while the trainer works (leased).
CASES = [
    *[(name, "claimed") for name in VICTIMS],
    *[(name, "leased") for name in ("controller", "buffer", "refit", "engine_worker", "trainer_rank")],
]


@pytest.mark.parametrize(("victim", "state"), CASES)
def test_a_killed_process(
    victim: str,
    state: str,
    recipe: Path,
    tmp_path: Path,
    undisturbed: dict[int, dict[str, Any]],
    record_testsuite_property: Callable[[str, object], None],
) -> None:
    with headrace(tmp_path, str(recipe)) as command:
        command.wait_for_step(KILL_AFTER)
        process = command.kill_while(state, lambda: VICTIMS[victim](command))
        summary = command.result()
        figures = {name: summary[name] for name in ("incarnation", "status")}
        figures |= {"seconds": round(command.seconds, 1), "redeliveries": command.redeliveries()}
        record_testsuite_property(f"{victim} {state}", json.dumps(figures))
        assert wait_gone([process], 5.0) == []
        if (victim, state) == ("gym", "claimed"):
            assert command.redeliveries() > 0
        assert summary["incarnation"] == (1 if victim.startswith("trainer") else 0)
        check_complete(command, summary)
        check_trains(undisturbed)
        check_same_steps(command.steps(), undisturbed)
