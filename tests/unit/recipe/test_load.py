"""Reading recipes: layers, origins, aliases, interpolation and the one clear line of each mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from services.recipe import Recipe, RecipeError, load, parse
from services.recipe.load import from_dict, load_resolved
from services.recipe.schema import known_keys
from tests.unit.recipe.conftest import Write


def failure(path: Path, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load(path, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_importing_the_recipe_pulls_no_other_room() -> None:
    code = (
        "import sys, services.recipe\n"
        "import services.recipe.not_built, services.recipe.data_check, services.recipe.files\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('protos', 'grpc', 'redis', 'torch', 'typer')"
        " or (m.startswith('services.') and not m.startswith('services.recipe'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_an_unknown_key_is_refused_where_it_stands_and_the_nearest_is_named(
    write: Write, recipe: Path
) -> None:
    bad = write(
        "bad.yaml", recipe.read_text().replace("num_generations_per_prompt", "num_generation_per_prompt")
    )
    text = failure(bad)
    assert text == (
        f"Unknown key grpo.num_generation_per_prompt ({bad}:4). Did you mean grpo.num_generations_per_prompt?"
    )


@pytest.mark.parametrize(
    ("override", "key", "near"),
    [
        ("grpo.num_promts_per_step=2", "grpo.num_promts_per_step", "grpo.num_prompts_per_step"),
        ("num_prompts_per_step=2", "num_prompts_per_step", "grpo.num_prompts_per_step"),
        ("policy.generation.vllm_cfg.tensor_paralel_size=2", None, "vllm_cfg.tensor_parallel_size"),
        ("lossfn.ratio_clip_c=3", "lossfn", "loss_fn"),
        ("stack.transprot=shm", "stack.transprot", "stack.transport"),
    ],
)
def test_an_unknown_override_names_the_nearest_key(
    recipe: Path, override: str, key: str | None, near: str
) -> None:
    text = failure(recipe, override)
    assert "override" in text
    assert f"{near}?" in text
    assert key is None or f"Unknown key {key} " in text


def test_every_key_has_its_origin_with_the_true_line(write: Write, recipe: Path) -> None:
    child = write("child.yaml", "# a comment\ndefaults: small.yaml\n\ngrpo:\n\n  seed: 7\n")
    loaded = load(child, ["policy.max_grad_norm=0.5", "loss_fn.ratio_clip_max=0.28"])
    origins = loaded.origins
    assert loaded.recipe.grpo.seed == 7
    assert origins["grpo.seed"] == f"{child}:6"
    assert origins["grpo.num_prompts_per_step"] == f"{recipe}:3"
    assert origins["policy.generation.max_new_tokens"] == f"{recipe}:12"
    assert origins["policy.max_grad_norm"] == "override"
    assert origins["loss_fn.ratio_clip_max"] == "override"
    assert origins["loss_fn.ratio_clip_min"] == "default"
    assert set(origins) == set(loaded.values)


def test_defaults_are_merged_depth_first_and_later_wins(write: Write, recipe: Path) -> None:
    write("deep/grand.yaml", "defaults: ../small.yaml\ngrpo: {seed: 1, val_batch_size: 5}\n")
    write("one.yaml", "defaults: deep/grand.yaml\ngrpo: {seed: 2}\n")
    write("two.yaml", "grpo: {seed: 3}\n")
    child = write("child.yaml", "defaults: [one.yaml, two.yaml]\nname: child\n")
    grpo = load(child).recipe.grpo
    assert (grpo.seed, grpo.val_batch_size, grpo.num_prompts_per_step) == (3, 5, 4)


def test_defaults_in_a_circle_and_missing_ones_are_refused(write: Write) -> None:
    write("a.yaml", "defaults: b.yaml\n")
    assert "circle" in failure(write("b.yaml", "defaults: a.yaml\n"))
    text = failure(write("c.yaml", "defaults: none.yaml\n"))
    assert "none.yaml" in text
    assert "c.yaml" in text


def test_override_marker_replaces_a_section(write: Write, recipe: Path) -> None:
    write("base.yaml", "defaults: small.yaml\npolicy: {optimizer: {name: a.B, kwargs: {lr: 1, eps: 2}}}\n")
    text = "defaults: base.yaml\npolicy: {optimizer: {kwargs: {_override_: true, momentum: 0.9}}}\n"
    optimizer = load(write("child.yaml", text)).recipe.policy.optimizer
    assert optimizer.name == "a.B"
    assert optimizer.kwargs == {"momentum": 0.9}


def test_interpolation_keeps_types_and_sees_overrides_and_defaults(
    write: Write, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECIPE_TEST_SEED", "11")
    text = """\
    defaults: small.yaml
    name: run-${grpo.seed}
    grpo:
      seed: ${env:RECIPE_TEST_SEED}
      val_batch_size: ${.num_prompts_per_step}
      max_num_steps: ${env:RECIPE_TEST_NONE,25}
    policy:
      train_global_batch_size: ${mul:${grpo.num_prompts_per_step},${grpo.num_generations_per_prompt}}
      train_micro_batch_size: ${sft.num_prompts_per_step}
    """
    found = load(write("child.yaml", text), ["grpo.num_prompts_per_step=6"]).recipe
    assert found.name == "run-11"
    assert (found.grpo.seed, found.grpo.val_batch_size, found.grpo.max_num_steps) == (11, 6, 25)
    assert found.policy.train_global_batch_size == 48
    assert found.policy.train_micro_batch_size == 128


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("${grpo.sed}", "names no key"),
        ("${grpo.seed}", "refers to itself"),
        ("${env:RECIPE_TEST_NONE}", "is not set"),
        ("${shell:rm}", "Unknown resolver"),
        ("${mul:a,2}", "Cannot compute"),
        ("'???'", "must be set"),
    ],
)
def test_a_broken_expression_is_refused(recipe: Path, value: str, said: str) -> None:
    assert said in failure(recipe, f"grpo.seed={value}")


def test_the_two_names_of_the_dtensor_section_are_one(write: Write, recipe: Path) -> None:
    write("base.yaml", "defaults: small.yaml\npolicy:\n  dtensor_cfg: {_v2: true, tensor_parallel_size: 2}\n")
    child = write("child.yaml", "defaults: base.yaml\npolicy:\n  automodel_cfg: {context_parallel_size: 4}\n")
    loaded = load(child, ["policy.dtensor_cfg.expert_parallel_size=8"])
    section = loaded.recipe.policy.automodel_cfg
    sizes = (section.tensor_parallel_size, section.context_parallel_size, section.expert_parallel_size)
    assert sizes == (2, 4, 8)
    assert loaded.origins["policy.automodel_cfg.tensor_parallel_size"].endswith(
        "base.yaml:3 (alias dtensor_cfg)"
    )
    both = write("both.yaml", "defaults: small.yaml\npolicy:\n  automodel_cfg: {}\n  dtensor_cfg: {}\n")
    assert "same section" in failure(both)


def test_learning_rates_without_a_dot_are_numbers(recipe: Path) -> None:
    kwargs = load(recipe, ["policy.optimizer.kwargs.lr=1e-4"]).recipe.policy.optimizer.kwargs
    assert kwargs["lr"] == 1e-4
    assert kwargs.keys() == {"lr"} or kwargs["weight_decay"] == 0.01


def test_a_key_written_twice_is_refused(write: Write) -> None:
    text = failure(write("twice.yaml", "grpo:\n  seed: 1\n  seed: 2\n"))
    assert "twice.yaml:3" in text
    assert "line 2" in text


def test_broken_yaml_names_the_line(write: Write) -> None:
    assert "broken.yaml:2" in failure(write("broken.yaml", "name: x\n  grpo: 1\n"))


def test_yaml_tags_construct_nothing(write: Write) -> None:
    text = failure(write("tag.yaml", "name: !!python/object/apply:os.getcwd []\n"))
    assert "tag.yaml:1" in text


@pytest.mark.parametrize("text", ["grpo.seed", "=1", "--grpo.seed=1", "grpo..seed=1"])
def test_what_is_no_override_is_refused(recipe: Path, text: str) -> None:
    assert "KEY=VALUE" in failure(recipe, text)


def test_a_wrong_type_names_key_value_and_place(recipe: Path) -> None:
    text = failure(recipe, "grpo.num_prompts_per_step=many")
    assert text.startswith('grpo.num_prompts_per_step is "many"')
    assert "(override)" in text


def test_a_missing_key_is_named(write: Write) -> None:
    assert failure(write("empty.yaml", "name: x\n")).startswith("policy must be set")


def test_json_and_yaml_give_the_same_recipe_back(recipe: Path, tmp_path: Path) -> None:
    loaded = load(
        recipe, ["checkpointing.checkpoint_must_save_by='00:03:45:00'", "policy.tokenizer.name='1e5'"]
    )
    assert parse(loaded.to_json()) == loaded.recipe
    kept = tmp_path / "kept.yaml"
    kept.write_text(loaded.to_yaml())
    assert load_resolved(kept).recipe == loaded.recipe
    assert from_dict(json.loads(loaded.to_json())).recipe == loaded.recipe
    assert loaded.recipe.checkpointing.must_save_after_s == 13500


def test_the_seeds_sections_and_key_names_are_known() -> None:
    keys = set(known_keys())
    for key in (
        "grpo.async_grpo.max_trajectory_age_steps", "grpo.reward_shaping.overlong_buffer_length",
        "loss_fn.truncated_importance_sampling_ratio_min", "policy.hf_config_overrides",
        "policy.automodel_cfg.moe_parallelizer.ignore_router_for_ac",
        "policy.make_sequence_length_divisible_by", "policy.generation.vllm_kwargs",
        "policy.generation.bad_words", "policy.generation.colocated.resources",
        "data.train.data_path", "env.nemo_gym.config_paths", "cluster.num_nodes",
        "checkpointing.checkpoint_must_save_by", "logger.wandb_enabled",
    ):  # fmt: skip
        assert key in keys


@pytest.mark.parametrize("name", ["arithmetic.yaml", "arithmetic-warmup.yaml"])
def test_the_shipped_recipes_load(name: str) -> None:
    path = Path(__file__).parents[3] / "recipes/tiny" / name
    assert isinstance(load(path).recipe, Recipe)
    assert yaml.safe_load(path.read_text())["name"] == load(path).recipe.name
