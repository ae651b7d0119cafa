"""Rules between keys, features that are not built, files and rows."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from services.recipe import RecipeError, load
from services.recipe.data_check import check_data, check_file
from services.recipe.errors import BadKeyError
from services.recipe.files import anchored, check_files
from services.recipe.not_built import not_built, refuse_not_built
from services.recipe.surroundings import Env
from tests.unit.recipe.conftest import ROW, Write


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["policy.train_global_batch_size=20"],
            "policy.train_global_batch_size: 20 is no multiple of the group (8",
        ),
        (["policy.train_global_batch_size=24"], "a step has 4 x 8 = 32 samples, no multiple of 24"),
        (["grpo.num_generations_per_prompt=1"], "a group of 1 has no baseline"),
        (["policy.generation.max_new_tokens=65"], "65 is above policy.max_total_sequence_length (64)"),
        (["policy.generation.vllm_cfg.max_model_len=32"], "is below policy.max_total_sequence_length (64)"),
        (["policy.generation.temperature=4"], "4 is above 2, the most that vLLM takes"),
        (["grpo.async_grpo.enabled=true"], "trajectories of older weights need a correction"),
        (
            ["grpo.async_grpo.in_flight_weight_updates=true"],
            "nothing is in flight when training is synchronous",
        ),
        (["stack.order=ready_first"], "synchronous training opens none"),
        (["policy.generation.temperature=0"], "policy.generation.temperature is 0"),
        (["loss_fn.truncated_importance_sampling_ratio=2"], "a bound without a type has no effect"),
        (["loss_fn.truncated_importance_sampling_type=tis"], "tis needs an upper bound"),
        (
            [
                "loss_fn.truncated_importance_sampling_type=tis",
                "loss_fn.truncated_importance_sampling_ratio=2",
            ],
            "truncation needs the correction itself",
        ),
        (
            ["grpo.advantage_clip_low=1", "grpo.advantage_clip_high=-1"],
            "is not below grpo.advantage_clip_high",
        ),
        (["loss_fn.ratio_clip_c=1"], "is not above 1"),
        (["loss_fn.force_on_policy_ratio=true", "policy.train_global_batch_size=16"], "a batch of 32"),
        (["grpo.val_at_start=true"], "there are no validation rows"),
        (["stack.min_engines=2"], "2 of 1 engines"),
        (["policy.scheduler=[{name: a}, {name: b}]"], "2 schedulers need 1 milestones"),
        (["checkpointing.metric_name=accuracy"], "must be val:KEY or train:KEY"),
    ],
)
def test_rules_between_keys(recipe: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(recipe, overrides)
    assert said in str(caught.value)
    assert "override" in str(caught.value)


def test_several_optimizer_steps_of_one_step_are_allowed(recipe: Path) -> None:
    assert load(recipe, ["policy.train_global_batch_size=16"]).recipe.policy.train_global_batch_size == 16


def test_supervised_batches_need_no_group(recipe: Path) -> None:
    overrides = ["kind=sft", "sft.num_prompts_per_step=6", "policy.train_global_batch_size=6"]
    assert load(recipe, overrides).recipe.generations_per_prompt == 1


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("grpo.use_dynamic_sampling=true", "grpo.use_dynamic_sampling"),
        ("policy.megatron_cfg.enabled=true", "policy.megatron_cfg.enabled"),
        ("grpo.reward_shaping.enabled=true", "grpo.reward_shaping.enabled"),
        ("policy.automodel_cfg.expert_parallel_size=8", "policy.automodel_cfg.expert_parallel_size"),
        ("reward_penalties.invalid_tool_call=true", "reward_penalties"),
        ("on_policy_distillation.enabled=true", "on_policy_distillation"),
    ],
)
def test_what_is_not_built_loads_and_is_refused_only_to_run(recipe: Path, override: str, key: str) -> None:
    found = load(recipe, [override]).recipe
    assert [entry.key for entry in not_built(found)] == [key]
    with pytest.raises(BadKeyError, match="is not built yet"):
        refuse_not_built(found)


def test_switches_that_are_off_ask_for_nothing(recipe: Path) -> None:
    overrides = [
        "reward_penalties.invalid_tool_call=false",
        "on_policy_distillation={enabled: false, alpha: 1}",
    ]
    assert not_built(load(recipe, overrides).recipe) == []


def test_missing_model_and_data_are_named(recipe: Path, tmp_path: Path) -> None:
    found = load(recipe).recipe
    check_files(found)
    for override, said in (
        (f"policy.model_name={tmp_path}/none", f"there is no model at {tmp_path}/none"),
        (f"policy.model_name={tmp_path}", "has no config.json"),
        ("policy.model_name=some-org/not-in-the-cache", "hf download some-org/not-in-the-cache"),
        (f"data.train.data_path={tmp_path}/none.jsonl", "data.train.data_path: there is no file"),
    ):
        with pytest.raises(BadKeyError) as caught:
            check_files(load(recipe, [override]).recipe)
        assert said in str(caught.value)


def test_anchored_paths_mean_the_same_elsewhere(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = [
        "policy.model_name=model",
        "data.train.data_path=rows.jsonl",
        "checkpointing.export_dir=out/x",
    ]
    found = anchored(load(recipe, [*overrides, "policy.tokenizer.name=org/model"]).recipe)
    assert found.policy.model_name == str(tmp_path / "model")
    assert found.data.train.data_path == str(tmp_path / "rows.jsonl")
    assert found.checkpointing.export_dir == str(tmp_path / "out/x")
    assert found.policy.tokenizer.name == "org/model"


def bad_row(write: Write, row: str, *, verified: bool = True) -> str:
    path = write("bad.jsonl", f"{json.dumps(ROW if verified else SUPERVISED)}\n\n{row}\n")
    with pytest.raises(RecipeError) as caught:
        check_file(path, Env(), verified=verified)
    assert f"({path}:3)" in str(caught.value)
    return str(caught.value)


SUPERVISED = {
    "responses_create_params": {
        "input": [{"role": "user", "content": "1 + 1 ="}, {"role": "assistant", "content": "2"}]
    }
}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"expected_answer": "2"}', "without responses_create_params"),
        ('{"responses_create_params": {"input": []}}', "no input"),
        ('{"responses_create_params": ', "not JSON"),
        ("[1]", "no JSON object"),
        ('{"responses_create_params": {"input": "x"}, "expected_answer": "2"}', "names no verifier"),
        (
            '{"responses_create_params": {"input": "x"}, "verifier": "exact_answer"}',
            "nothing to verify against",
        ),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(write: Write, row: str, said: str) -> None:
    assert said in bad_row(write, row)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"verifier": "exact_anwser"}, "unknown verifier, 'exact_anwser'"),
        ({"agent_ref": {"name": "single_trun"}}, "unknown agent, 'single_trun'"),
        ({"environment": "chess"}, "unknown environment, 'chess'"),
    ],
)
def test_a_name_that_nobody_has_is_refused_with_the_nearest(
    write: Write, changes: dict[str, Any], said: str
) -> None:
    line = bad_row(write, json.dumps({**ROW, **changes}))
    assert said in line
    assert ("Did you mean" in line) == ("chess" not in said)


def test_names_of_the_recipe_are_known(write: Write) -> None:
    env = Env.model_validate(
        {
            "environments": {"chess": {"options": {"path": "own:Chess"}}, "sums": {}},
            "verifiers": {"mine": {"options": {"path": "own:score"}}},
        }
    )
    rows = [
        {**ROW, "verifier": "mine"},
        {**ROW, "environment": "chess", "agent_ref": {"name": "whatever"}},
        {**ROW, "agent_ref": {"name": "sums"}},
    ]
    path = write("own.jsonl", "\n".join(map(json.dumps, rows)))
    assert check_file(path, env, verified=True) == 3


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("env.default_verifier=exact", "env.default_verifier"),
        ("env.environments={sums: {verifier: exact}}", "env.environments.sums.verifier"),
        ("env.environments={sums: {options: {agent: nobody}}}", "env.environments.sums.options"),
        ("env.verifiers={mine: {timeout_s: 3}}", "env.verifiers.mine"),
        ("data.train.agent=nobody", "data.train.agent"),
    ],
)
def test_a_recipe_that_names_what_nobody_has(recipe: Path, override: str, key: str) -> None:
    with pytest.raises(RecipeError, match=f"{re.escape(key)}: there is no"):
        load(recipe, [override])


def test_a_supervised_row_needs_an_answer_and_no_verifier(write: Write) -> None:
    row = '{"responses_create_params": {"input": [{"role": "user", "content": "x"}]}}'
    assert "nothing to learn" in bad_row(write, row, verified=False)
    target = {**json.loads(row), "target": "2"}
    assert check_file(write("target.jsonl", json.dumps(target)), Env(), verified=False) == 1


def test_an_environment_may_name_the_verifier(write: Write) -> None:
    row = {key: value for key, value in ROW.items() if key != "verifier"}
    path = write("rows.jsonl", json.dumps({**row, "environment": "sums"}))
    env = Env.model_validate({"environments": {"sums": {"verifier": "exact_answer"}}})
    assert check_file(path, env, verified=True) == 1
    path = write("plain.jsonl", json.dumps(row))
    assert check_file(path, Env(default_verifier="exact_answer"), verified=True) == 1


def test_ten_thousand_rows_take_no_time(write: Write, recipe: Path) -> None:
    path = write("many.jsonl", (json.dumps(ROW) + "\n") * 10_000)
    began = time.perf_counter()
    assert check_data(load(recipe, [f"data.train.data_path={path}"]).recipe) == {"data.train": 10_000}
    assert time.perf_counter() - began < 2.0
