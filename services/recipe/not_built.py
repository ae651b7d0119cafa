"""Keys that a recipe may carry and Headrace does not carry out yet: one table.

A recipe with such a key loads, ``headrace plan`` lists it, ``headrace run`` refuses it. Ignoring it would
train something else than the recipe says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from services.recipe.errors import BadKeyError
from services.recipe.root import Recipe


class NotBuilt(NamedTuple):
    """A key whose value asks for a feature that does not exist yet."""

    key: str
    value: Any
    off: tuple[Any, ...]


# key -> values that ask for nothing
_OFF: dict[str, tuple[Any, ...]] = {
    "grpo.use_dynamic_sampling": (False,),
    "grpo.batch_multiplier": (1.0,),
    "grpo.reward_scaling.enabled": (False,),
    "grpo.reward_shaping.enabled": (False,),
    "grpo.max_rollout_turns": (1,),
    "grpo.adv_estimator.name": ("grpo",),
    "grpo.adv_estimator.minus_baseline": (True,),
    "grpo.invalid_tool_call_advantage": (None,),
    "grpo.malformed_thinking_advantage": (None,),
    "grpo.stop_at_validation_metric": (None,),
    "grpo.deduplicate_multimodal_data": (False,),
    "grpo.calculate_advantages_on_gpu": (False,),
    "loss_fn.truncated_importance_sampling_type": (None, "tis", "icepop"),
    "loss_fn.sequence_level_importance_ratios": (False,),
    "loss_fn.use_kl_in_reward": (False,),
    "loss_fn.use_cispo": (False,),
    "loss_fn.disable_ppo_ratio": (False,),
    "loss_fn.positive_example_nll_weight": (0.0,),
    "policy.precision": ("bfloat16", "float32"),
    "policy.megatron_cfg.enabled": (False,),
    "policy.sequence_packing.enabled": (False,),
    "policy.offload_optimizer_for_logprob": (False,),
    "policy.is_vlm": (False,),
    "policy.draft": ({},),
    "policy.router_replay": ({},),
    "policy.automodel_cfg.cpu_offload": (False,),
    "policy.automodel_cfg.sequence_parallel": (False,),
    "policy.automodel_cfg.activation_checkpointing": (False,),
    "policy.automodel_cfg.tensor_parallel_size": (1,),
    "policy.automodel_cfg.context_parallel_size": (1,),
    "policy.automodel_cfg.expert_parallel_size": (1,),
    "policy.automodel_cfg.custom_parallel_plan": (None,),
    "policy.automodel_cfg.automodel_kwargs": ({},),
    "policy.automodel_cfg.lora_cfg": ({},),
    "policy.automodel_cfg.env_vars": ({},),
    "policy.generation.top_p": (1.0,),
    "policy.generation.top_k": (None, -1, 0),
    "policy.generation.min_p": (0.0,),
    "policy.generation.refit_transport": (None, "shm"),
    "policy.generation.vllm_cfg.expose_http_server": (False,),
    "policy.generation.vllm_cfg.enable_vllm_metrics_logger": (False,),
    "policy.generation.vllm_cfg.reset_encoder_cache_after_weight_update": (False,),
    "data.max_input_seq_length": (None,),
    "data.use_multiple_dataloader": (False,),
    "data.default": ({},),
    "env.should_use_nemo_gym": (False,),
    "env.should_mask_flagged_samples": (False,),
    "env.nemo_gym.config_paths": ([],),
    "logger.wandb_enabled": (False,),
    "logger.tensorboard_enabled": (False,),
    "logger.mlflow_enabled": (False,),
    "logger.swanlab_enabled": (False,),
    "logger.monitor_gpus": (False,),
    "checkpointing.ft_save_period": (None,),
    "checkpointing.ft_keep_latest_k": (None,),
    "checkpointing.checkpoint_must_save_by": (None,),
    "checkpointing.model_save_format": ("safetensors",),
    "cluster.gpus_per_node": (0, 1),
    "cluster.num_nodes": (1,),
    "on_policy_distillation": ({}, {"enabled": False}),
    "reward_penalties": ({},),
    "data_plane": ({},),
    "stack.transport": ("shm",),
    "stack.on_restore": ("replay",),
    "stack.trainer_processes": (1,),
}  # fmt: skip


# Keys that belong to a switch of the table above, or to another program's way of doing things. What is
# trained does not depend on them.
NO_EFFECT = frozenset({
    "stack.trace",
    "grpo.val_batch_size", "grpo.skip_reference_policy_logprobs_calculation",
    "grpo.dynamic_sampling_max_gen_batches",
    "grpo.reward_shaping.overlong_buffer_length", "grpo.reward_shaping.overlong_buffer_penalty",
    "grpo.reward_shaping.max_response_length", "grpo.reward_shaping.stop_properly_penalty_coef",
    "grpo.async_grpo.max_generation_failures",
    "policy.generation_batch_size", "policy.automodel_cfg._v2",
    "policy.automodel_cfg.moe_parallelizer.ignore_router_for_ac",
    "policy.automodel_cfg.moe_parallelizer.reshard_after_forward",
    "policy.dynamic_batching.sequence_length_round", "policy.sequence_packing.algorithm",
    "policy.sequence_packing.sequence_length_round", "policy.make_sequence_length_divisible_by",
    "policy.refit_buffer_size_gb", "data.train.dataset_name", "data.train.env_name",
    "data.validation.dataset_name", "data.validation.env_name", "data.num_workers",
    "env.should_log_nemo_gym_responses", "logger.log_dir", "logger.num_val_samples_to_print", "logger.wandb",
    "logger.tensorboard", "logger.mlflow", "logger.swanlab", "logger.gpu_monitoring", "cluster.segment_size",
    "cluster.master_port_range", "checkpointing.save_consolidated",
})  # fmt: skip


def switches() -> Mapping[str, tuple[Any, ...]]:
    """Key -> the values that are built, for documentation."""
    return _OFF


def not_built(recipe: Recipe) -> list[NotBuilt]:
    """The keys of ``recipe`` that ask for what is not built yet."""
    found = []
    for key, off in _OFF.items():
        value = _value(recipe, key)
        if value not in off and not _all_off(value):
            found.append(NotBuilt(key, value, off))
    return found


def refuse_not_built(recipe: Recipe) -> None:
    """Raise :class:`BadKeyError` for the first such key."""
    for key, value, off in not_built(recipe):
        raise BadKeyError(key, f"{value!r} is not built yet", do=f"Set it to {json.dumps(off[0])}.")


def _value(recipe: Recipe, key: str) -> Any:
    value: Any = recipe
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _all_off(value: Any) -> bool:
    """A table of switches in which none is on, or one whose ``enabled`` is off."""
    if not isinstance(value, dict):
        return False
    return value.get("enabled") is False or all(item is False for item in value.values())
