"""Steps per hour of asynchronous training, in flight, against synchronous training: with a straggler in each
batch.

The demo's recipe, and the same with W = 1 and in-flight updates: same model, rows, seed, learning rate and
number of steps. One sample of each batch ends 20 median sample latencies late, because its environment
sleeps; the median is measured first, in a synchronous run without straggler. Both models then answer 1,000
held-out questions, greedily. Time is that in which steps are trained: start and validation are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.async_parts.runs import Folder, Outcome
from benchmarks.report import Claim, say
from services.runtime.errors import Exhausted

SUMMARY = "steps/hour of W = 1 in flight against synchronous, with a straggler in each batch"
BAR = 1.5
ACCURACY_BAND = 0.06
STRAGGLER = 20.0
# An environment has 60 s for one answer.
LONGEST_S = 55.0
PROMPTS, CALIBRATION_STEPS = 32, 8
PLUGIN = "benchmarks.async_parts.straggler:Straggler"


def run(args: Sequence[str]) -> list[Claim]:
    """Measure; one claim."""
    options = _parse(args)
    folder = Folder(options.out, options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    folder.prepare()
    calm = folder.train(
        "arithmetic", _changes(options, CALIBRATION_STEPS, 0.0), "calibration: synchronous, no straggler"
    )
    slow = _sleep(calm.median_s)
    changes = _changes(options, options.steps, slow)
    synchronous = folder.train("arithmetic", changes, f"synchronous, {options.steps} steps")
    changes["stack"] = {"order": options.order}
    ahead = folder.train("arithmetic-async", changes, f"W = 1 in flight, {options.steps} steps")
    return [_claim(options, slow, calm, synchronous, ahead)]


def _parse(args: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headrace bench async", description=SUMMARY)
    parser.add_argument("--steps", type=int, default=60, help="train steps of each of the two runs")
    parser.add_argument("--order", choices=("in_order", "ready_first"), default="in_order")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/bench-async"), help="model, rows and runs")
    return parser.parse_args(args)


def _sleep(median: float) -> float:
    """Seconds that the straggler sleeps."""
    slow = STRAGGLER * median
    if slow > LONGEST_S:
        raise Exhausted(
            f"A median sample latency of {median:.1f} s makes the straggler sleep {slow:.0f} s, and an "
            "environment gets a minute",
            where="bench async",
            do="Run it on a machine that is idle otherwise.",
        )
    say(f"median sample latency {median:.3f} s, so the straggler sleeps {slow:.1f} s")
    return slow


def _changes(options: argparse.Namespace, steps: int, seconds: float) -> dict[str, Any]:
    """What all runs have in common, over their recipe."""
    straggler: Mapping[str, Any] = {
        "path": PLUGIN, "run_seed": options.seed, "every": PROMPTS, "groups": 2 * PROMPTS * (steps + 2),
        "seconds": seconds,
    }  # fmt: skip
    grpo = {
        "seed": options.seed, "max_num_steps": steps, "num_prompts_per_step": PROMPTS, "val_period": 0,
        "val_at_start": False, "val_at_end": True,
    }  # fmt: skip
    # The rows name the agent `single_turn`; an environment of that name takes them over.
    env = {"environments": {"single_turn": {"options": dict(straggler)}}}
    return {"grpo": grpo, "env": env}


def _claim(
    options: argparse.Namespace, slow: float, calm: Outcome, synchronous: Outcome, ahead: Outcome
) -> Claim:
    difference = ahead.accuracy - synchronous.accuracy
    if abs(difference) > ACCURACY_BAND:
        say(f"accuracies differ by {difference:+.3f}, more than {ACCURACY_BAND}: the ratio compares nothing")
    return Claim(
        name="async",
        value=ahead.steps_per_hour,
        baseline=synchronous.steps_per_hour,
        unit="steps/hour",
        baseline_name="synchronous (W = 0), same recipe, rows, seed and steps",
        settings={
            "steps": options.steps, "order": options.order, "seed": options.seed, "straggler_s": slow,
            "samples_per_step": PROMPTS * 8, "held_out_rows": 1000,
        },
        bar=BAR,
        extra={
            "accuracy": ahead.accuracy, "accuracy_baseline": synchronous.accuracy,
            "accuracy_equal": abs(difference) <= ACCURACY_BAND,
            "median_s_without_straggler": calm.median_s,
            "median_s": ahead.median_s, "median_s_baseline": synchronous.median_s,
            "slowest_s": ahead.slowest_s, "slowest_s_baseline": synchronous.slowest_s,
            "token_age_max": ahead.age_max, "token_mult_prob_error": ahead.mismatch,
            "balanced": ahead.balanced and synchronous.balanced, "dropped": dict(ahead.ledger["dropped"]),
        },
    )  # fmt: skip
