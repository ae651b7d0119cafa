"""``headrace plan``'s arithmetic on a model whose size is known."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from services.cli.estimate import buffer_bytes, memory, parameters, staleness, totals
from services.cli.plan import make_plan
from services.recipe import load

ASYNC = ("grpo.async_grpo.enabled=true", "loss_fn.use_importance_sampling_correction=true")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of 10 × 7 + 30 parameters, headers alone."""
    folder = tmp_path / "sized"
    folder.mkdir()
    for name, shape in (("a", [10, 7]), ("b", [30])):
        header = json.dumps(
            {"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}, "__metadata__": {}}
        )
        raw = struct.pack("<Q", len(header)) + header.encode()
        (folder / f"{name}.safetensors").write_bytes(raw)
    return folder


def test_parameters_are_counted_from_the_headers(model: Path, tmp_path: Path) -> None:
    assert parameters(model) == 100
    assert parameters(tmp_path / "nothing") is None
    (model / "c.safetensors").write_bytes(b"\xff" * 16)
    assert parameters(model) is None


def test_memory_of_a_bfloat16_run_ahead(recipe: Path, model: Path) -> None:
    overrides = (*ASYNC, f"policy.model_name={model}", "policy.precision=bfloat16")
    found = {
        f.name: f.bytes
        for f in memory(load(recipe, (*overrides, "grpo.async_grpo.max_trajectory_age_steps=3")).recipe)
    }
    assert found["trainer: master weights"] == 400
    assert found["trainer: Adam's moments"] == 800
    assert found["trainer: weights of older versions"] == 3 * 400
    assert found["engine: weights"] == 200
    assert found["trainer: activations"] is None
    unknown = {f.name: f.bytes for f in memory(load(recipe, ("policy.model_name=some/model",)).recipe)}
    assert unknown["trainer: master weights"] is None
    assert "trainer: weights of older versions" not in unknown


def test_work_in_flight_is_bounded_by_the_window(recipe: Path) -> None:
    synchronous = staleness(load(recipe).recipe)
    ahead = staleness(load(recipe, (*ASYNC, "grpo.async_grpo.max_trajectory_age_steps=2")).recipe)
    assert (synchronous["steps_ahead"], synchronous["oldest_trained_token"]) == (0, 0)
    assert ahead["open_groups_most"] == 3 * synchronous["open_groups_most"]
    assert ahead["oldest_trained_token"] == 2
    assert ahead["publish"] == "drained"
    assert buffer_bytes(load(recipe).recipe).bytes


def test_totals_know_the_rows_or_say_that_they_do_not(recipe: Path) -> None:
    loaded = load(recipe, ("grpo.max_num_steps=10",)).recipe
    assert totals(loaded, None)["epochs"] is None
    whole = totals(loaded, loaded.prompts_per_step * 5)
    assert (whole["steps"], whole["epochs"]) == (10, 2.0)
    assert make_plan(load(recipe))["totals"]["steps"] == load(recipe).recipe.max_steps
