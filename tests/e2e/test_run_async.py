"""Runs ahead of training, drained on one engine and in flight on two: ages, mismatch, validation, books."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.conftest import PROMPTS, SAMPLES, Run, World
from tests.e2e.test_run_traces import by_trace, check_trees, links, roots

pytest.importorskip("vllm")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

STEPS = 10
AHEAD = {
    "grpo.async_grpo.enabled": True,
    "grpo.async_grpo.max_trajectory_age_steps": 1,
    "grpo.max_num_steps": STEPS,
    "stack.rescore_samples": None,
}
MODES: dict[str, dict[str, Any]] = {
    "drained": {"grpo.val_at_start": False},
    "in_flight": {
        "grpo.async_grpo.in_flight_weight_updates": True,
        "grpo.async_grpo.recompute_kv_cache_after_weight_updates": True,
        "stack.engines": 2,
        "grpo.val_period": 4,
        "grpo.val_at_start": False,
    },
}


@pytest.fixture(scope="module", params=sorted(MODES))
def ahead(request: pytest.FixtureRequest, world: World, sft_run: Run) -> tuple[str, Run]:
    """The run of one mode."""
    recipe = world.grpo(**AHEAD, **MODES[request.param])
    done = sft_run.home.headrace("run", str(recipe), "--json")
    assert done.status == 0, done.stderr
    return request.param, Run(sft_run.home, done)


def test_a_run_ahead_of_training(ahead: tuple[str, Run]) -> None:
    mode, run = ahead
    summary = run.summary
    assert (summary["status"], summary["steps"]) == ("completed", STEPS)
    metrics, ledger = summary["metrics"], summary["ledger"]
    # Ahead of training in deed (some tokens are older), and never further than W.
    assert 0 < metrics["avg_trajectory_age"] <= 1
    assert metrics["trajectory_age_max"] == 1
    # The trainer looked at every token's own version, not at what the controller believes.
    assert metrics["token_age_max"] == 1
    assert metrics["rescored_share"] == 1
    assert 1.0 <= metrics["token_mult_prob_error"] <= 1.005
    assert metrics["token_mult_prob_error_raw"] > metrics["token_mult_prob_error"]
    assert ledger["balanced"] is True
    assert ledger["trained"] == ledger["dispatched"] == PROMPTS * STEPS
    assert ledger["samples"]["trained"] == PROMPTS * STEPS * SAMPLES
    print(
        f"{mode}: age {metrics['avg_trajectory_age']:.3f}, error {metrics['token_mult_prob_error']:.7f}, "
        f"raw {metrics['token_mult_prob_error_raw']:.5f}, overhead {summary['overhead']['share']:.1%}"
    )
    if mode == "in_flight":
        history = {record["step"]: record for record in summary["validation"]["history"]}
        assert set(history) >= {4, 8, STEPS}


def test_its_traces_have_no_gap(ahead: tuple[str, Run]) -> None:
    traces = by_trace(ahead[1].spans())
    check_trees(traces, PROMPTS * STEPS)
    linked = links(traces, STEPS)
    assert set(linked) == {(root["trace_id"], root["span_id"]) for root in roots(traces, "train")}
    # A dispatch is not tied to the step that trains on it, but to exactly one.
    assert {len(steps) for steps in linked.values()} == {1}
