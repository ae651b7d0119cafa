"""Refits of a real vLLM engine: the weights land, and whatever does not land is named.

One engine process for each model; its scenarios run once and the tests below look at what happened. Removing
either work-around of ``refit_bridge.receiver.cpu_faults`` makes one of these tests fail.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
ROOT = Path(__file__).parents[3]
CLOSE = 1e-4

Facts = dict[str, Any]
_ran: dict[str, dict[str, Facts]] = {}


def run(kind: str, folder: Path) -> dict[str, Facts]:
    """What happened in each scenario of a model; the engine is started once for all tests."""
    if kind not in _ran:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-m", "tests.e2e.refit.driver", kind, str(folder)],
            capture_output=True, text=True, timeout=220, cwd=folder, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        lines = [
            line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")
        ]
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        _ran[kind] = {facts["scenario"]: facts for facts in map(json.loads, lines)}
    return _ran[kind]


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Facts]:
    return run("tied", tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Facts]:
    return run("untied", tmp_path_factory.mktemp("untied"))


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Facts]:
    return run("moe", tmp_path_factory.mktemp("moe"))


def names(facts: Facts, kind: str = "failures") -> set[str]:
    return {row["name"] for row in facts[kind]}


@pytest.mark.parametrize("kind", ["tied", "untied", "moe"])
def test_after_each_refit_the_engine_answers_as_the_trainer(kind: str, request: pytest.FixtureRequest):
    scenarios: dict[str, Facts] = request.getfixturevalue(kind)
    assert scenarios["base"]["difference"] < CLOSE
    for step in ("first", "second"):
        facts = scenarios[step]
        assert facts["before"] > 0.1, "the weights did not change enough to show anything"
        assert facts["difference"] < CLOSE
        assert not facts["failures"]
    assert scenarios["small_step"]["difference"] < CLOSE


@pytest.mark.parametrize("kind", ["tied", "untied", "moe"])
def test_every_tensor_of_the_plan_is_asked_for_its_image(kind: str, request: pytest.FixtureRequest):
    facts = request.getfixturevalue(kind)["first"]
    # A tied lm_head is asked too, although it is no tensor of the plan.
    assert facts["checked"] == facts["names"] + (kind == "tied")
    assert facts["unchecked"] == []


def test_without_repacking_a_tied_lm_head_is_stale_and_named(tied: dict[str, Facts]):
    facts = tied["without_repack_tied_heads"]
    assert facts["difference"] > CLOSE, "vLLM has mended its fault: the work-around can go"
    assert names(facts) == {"lm_head.weight"}
    again = tied["again_with_repack_tied_heads"]
    assert again["difference"] < CLOSE
    assert not again["failures"]


def test_without_a_kernel_reset_experts_are_scrambled_and_named(moe: dict[str, Facts]):
    facts = moe["without_reset_expert_kernels"]
    assert facts["difference"] > CLOSE, "vLLM has mended its fault: the work-around can go"
    assert "model.layers.0.mlp.experts.0.down_proj.weight" in names(facts)
    assert all(".experts." in name for name in names(facts))
    again = moe["again_with_reset_expert_kernels"]
    assert again["difference"] < CLOSE
    assert not again["failures"]


def test_a_damaged_tensor_is_refused_by_name_and_a_full_cycle_repairs_the_engine(untied: dict[str, Facts]):
    assert "model.layers.1.mlp.up_proj.weight arrived damaged" in untied["corrupted"]["error"]
    after = untied["after_corrupted"]
    assert after["difference"] < CLOSE
    assert not after["failures"]


def test_a_tensor_that_never_arrived_is_named(untied: dict[str, Facts]):
    facts = untied["missing_slice"]
    assert names(facts) == {"model.layers.1.self_attn.k_proj.weight"}
    assert names(facts, "unchecked") == {
        "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.v_proj.weight",
    }  # fmt: skip


def test_a_tensor_that_the_plan_forgot_is_named(untied: dict[str, Facts]):
    assert names(untied["missing_in_plan"]) == {"model.layers.0.mlp.down_proj.weight"}


def test_an_unknown_tensor_is_refused_by_name_and_a_full_cycle_repairs_the_engine(untied: dict[str, Facts]):
    assert "nope" in untied["unknown"]["error"]
    after = untied["after_unknown"]
    assert after["difference"] < CLOSE
    assert not after["failures"]


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_the_stale_head_of_the_fault_hook_is_named(kind: str, request: pytest.FixtureRequest):
    scenarios: dict[str, Facts] = request.getfixturevalue(kind)
    assert names(scenarios["stale_fault"]) == {"lm_head.weight"}
    assert scenarios["after_stale_fault"]["difference"] < CLOSE
