"""What must hold at the end of a run, whatever was killed in it."""

from __future__ import annotations

import math
from typing import Any

from tests.chaos.headrace import Headrace, wait_gone
from tests.chaos.world import PROMPTS, SAMPLES, STEPS

LOSS_TOLERANCE = 1e-6
EXACT = ("lr", "reward", "total_num_tokens", "num_valid_samples")


def check_complete(command: Headrace, summary: dict[str, Any]) -> None:
    """Completed, each group trained once, the books balance, nothing is left behind."""
    groups = PROMPTS * STEPS
    assert summary["status"] == "completed"
    assert summary["steps"] == STEPS
    ledger = summary["ledger"]
    assert (ledger["dispatched"], ledger["trained"], ledger["open"]) == (groups, groups, 0)
    assert ledger["dropped"] == {}
    assert ledger["samples"]["trained"] == groups * SAMPLES
    trained = [group for record in command.steps().values() for group in record["groups"]]
    assert trained == list(range(groups)), "each group once, in the order of its draw"
    audit = command.audit()
    assert audit["balanced"] is True, audit
    assert command.weight_files() == []
    assert wait_gone(command.processes(), 10.0) == []


def check_same_steps(found: dict[int, dict[str, Any]], wanted: dict[int, dict[str, Any]]) -> None:
    """Step for step: groups, order and learning rates exactly, losses to 1e-6."""
    assert list(found) == list(wanted)
    for step, record in wanted.items():
        other = found[step]
        assert other["groups"] == record["groups"], f"step {step}"
        for name in EXACT:
            assert other["metrics"][name] == record["metrics"][name], f"step {step}: {name}"
        loss, expected = other["metrics"]["loss"], record["metrics"]["loss"]
        assert math.isclose(loss, expected, rel_tol=0.0, abs_tol=LOSS_TOLERANCE), (
            f"step {step}: {loss} {expected}"
        )


def check_trains(steps: dict[int, dict[str, Any]]) -> None:
    """The comparison means something: there are rewards, gradients and changing learning rates."""
    assert all(record["metrics"]["grad_norm"] > 0 for record in steps.values())
    assert len({record["metrics"]["lr"] for record in steps.values()}) == len(steps)
    assert any(abs(record["metrics"]["loss"]) > 100 * LOSS_TOLERANCE for record in steps.values())
