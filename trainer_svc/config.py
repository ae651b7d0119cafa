"""The trainer's part of the recipe as small frozen dataclasses; the only place that reads recipe keys.

Invariant: what this room cannot carry out is refused here, by key, before a model is loaded. Rules across
recipe keys (batch multiples, truncation bounds) are checked by :mod:`services.recipe` when a recipe is
loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from pydantic import ValidationError

from services.recipe.root import Recipe
from services.runtime.errors import InvalidInput
from trainer_svc.algorithms.advantages import AdvantageSettings
from trainer_svc.algorithms.correction import Correction
from trainer_svc.algorithms.kl import KlPenalty
from trainer_svc.algorithms.losses import PolicyLossSettings


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which policy; ``precision`` is of forward and backward, ``wire_dtype`` of the engine's weights."""

    model_name: str
    tokenizer_name: str
    overrides: Mapping[str, Any]
    precision: str
    wire_dtype: str
    temperature: float
    chunk_tokens: int | None


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """Rows of an optimizer step and of a micro-batch; ``*_tokens`` is a budget of padded tokens instead."""

    global_rows: int
    micro_rows: int
    logprob_rows: int
    micro_tokens: int | None
    logprob_tokens: int | None
    max_length: int


@dataclass(frozen=True, slots=True)
class OptimConfig:
    """``schedulers`` are (name, kwargs), joined at ``milestones`` (counted in RL steps)."""

    name: str
    kwargs: Mapping[str, Any]
    schedulers: tuple[tuple[str, Mapping[str, Any]], ...]
    milestones: tuple[int, ...]
    max_grad_norm: float | None


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Checkpoints kept besides the latest: the best by ``metric``, without one the most recent."""

    save_optimizer: bool
    keep_top_k: int | None
    metric: str | None
    higher_is_better: bool


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """Everything that the trainer reads of a recipe."""

    kind: Literal["grpo", "sft"]
    model: ModelConfig
    batch: BatchConfig
    optim: OptimConfig
    loss: PolicyLossSettings
    advantages: AdvantageSettings
    checkpoint: CheckpointConfig
    overlong_filtering: bool
    error_threshold: float | None
    """Rows whose mean exp|l_gen - l_old| is above it do not train."""
    window: int
    """W: how many versions a trained token may be behind."""
    rescore_samples: int | None
    """Samples of a step whose older tokens are scored at their own version; None is all, 0 none."""


def load_config(recipe_json: str) -> TrainerConfig:
    """The configuration in a resolved recipe; raises InvalidInput with the key."""
    try:
        recipe = Recipe.model_validate_json(recipe_json)
    except ValidationError as exc:
        first = exc.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "recipe"
        raise InvalidInput(f"{key}: {first['msg']}", where="recipe", reason="BAD_RECIPE") from exc
    for key, refused in _unsupported(recipe).items():
        if refused:
            raise InvalidInput(
                f"{key} is not supported by the trainer",
                where="recipe",
                do="Turn it off.",
                reason="BAD_RECIPE",
            )
    return TrainerConfig(
        kind=recipe.kind,
        model=_model(recipe),
        batch=_batch(recipe),
        optim=_optim(recipe),
        loss=_loss(recipe),
        advantages=AdvantageSettings(
            leave_one_out=recipe.grpo.leaves_one_out,
            normalize=recipe.grpo.normalizes_rewards,
            clip_low=recipe.grpo.advantage_clip_low,
            clip_high=recipe.grpo.advantage_clip_high,
        ),
        checkpoint=CheckpointConfig(
            recipe.checkpointing.save_optimizer,
            recipe.checkpointing.keep_top_k,
            recipe.checkpointing.metric_name,
            recipe.checkpointing.higher_is_better,
        ),
        overlong_filtering=recipe.grpo.overlong_filtering,
        error_threshold=recipe.grpo.seq_logprob_error_threshold,
        window=_window(recipe),
        rescore_samples=recipe.stack.rescore_samples,
    )


def _unsupported(recipe: Recipe) -> dict[str, bool]:
    """Key -> whether the recipe asks for it."""
    loss, policy, generation = recipe.loss_fn, recipe.policy, recipe.policy.generation
    filtered = generation.top_p < 1 or (generation.top_k or 0) > 0 or generation.min_p > 0
    rows = recipe.prompts_per_step * recipe.generations_per_prompt
    several = loss.force_on_policy_ratio and rows != policy.train_global_batch_size
    unjudged = (
        loss.truncated_importance_sampling_type is None
        and loss.truncated_importance_sampling_ratio is not None
    )
    grpo = recipe.kind == "grpo"
    return {
        "grpo.adv_estimator.name other than grpo": recipe.grpo.adv_estimator.name != "grpo",
        "loss_fn.sequence_level_importance_ratios": loss.sequence_level_importance_ratios,
        "loss_fn.disable_ppo_ratio": loss.disable_ppo_ratio,
        "loss_fn.use_cispo": loss.use_cispo,
        "loss_fn.use_kl_in_reward": loss.use_kl_in_reward,
        "loss_fn.positive_example_nll_weight": loss.positive_example_nll_weight > 0,
        "loss_fn.truncated_importance_sampling_type seq-mask-tis": loss.truncated_importance_sampling_type
        == "seq-mask-tis",
        "loss_fn.truncated_importance_sampling_ratio without a type": unjudged,
        "loss_fn.force_on_policy_ratio with more than one optimizer step": several,
        "policy.precision float16": policy.precision == "float16",
        "policy.sequence_packing": policy.sequence_packing.enabled,
        "policy.generation.top_p, top_k or min_p (log-probabilities are of the whole distribution)": grpo
        and filtered,
    }


def _window(recipe: Recipe) -> int:
    ahead = recipe.grpo.async_grpo
    return ahead.max_trajectory_age_steps if recipe.kind == "grpo" and ahead.enabled else 0


def _model(recipe: Recipe) -> ModelConfig:
    policy = recipe.policy
    return ModelConfig(
        model_name=policy.model_name,
        tokenizer_name=policy.tokenizer.name or policy.model_name,
        overrides=policy.hf_config_overrides,
        precision=policy.precision,
        wire_dtype=policy.generation.vllm_cfg.precision or policy.precision,
        temperature=policy.generation.temperature if recipe.kind == "grpo" else 1.0,
        chunk_tokens=policy.logprob_chunk_size,
    )


def _batch(recipe: Recipe) -> BatchConfig:
    policy = recipe.policy
    rows = policy.train_micro_batch_size
    length = policy.max_total_sequence_length
    dynamic = policy.dynamic_batching
    tokens = (dynamic.train_mb_tokens or rows * length) if dynamic.enabled else None
    return BatchConfig(
        global_rows=policy.train_global_batch_size,
        micro_rows=rows,
        logprob_rows=policy.logprob_batch_size or rows,
        micro_tokens=tokens,
        logprob_tokens=(dynamic.logprob_mb_tokens or tokens) if dynamic.enabled else None,
        max_length=length,
    )


def _optim(recipe: Recipe) -> OptimConfig:
    policy = recipe.policy
    parts = policy.scheduler
    return OptimConfig(
        name=policy.optimizer.name,
        kwargs=policy.optimizer.kwargs,
        schedulers=tuple((part.name, part.kwargs) for part in parts if part.name is not None),
        milestones=tuple(step for part in parts for step in part.milestones or []),
        max_grad_norm=policy.max_grad_norm,
    )


def _loss(recipe: Recipe) -> PolicyLossSettings:
    loss = recipe.loss_fn
    truncation = cast("Literal['tis', 'icepop'] | None", loss.truncated_importance_sampling_type)
    return PolicyLossSettings(
        ratio_clip_min=loss.ratio_clip_min,
        ratio_clip_max=loss.ratio_clip_max,
        ratio_clip_c=loss.ratio_clip_c,
        token_level=loss.token_level_loss,
        force_on_policy_ratio=loss.force_on_policy_ratio,
        correction=Correction(
            loss.use_importance_sampling_correction,
            truncation,
            loss.truncated_importance_sampling_ratio_min,
            loss.truncated_importance_sampling_ratio,
        ),
        kl=KlPenalty(
            loss.reference_policy_kl_penalty if recipe.kind == "grpo" else 0.0,
            loss.reference_policy_kl_type,
            loss.kl_input_clamp_value,
            loss.kl_output_clamp_value,
            loss.use_on_policy_kl_approximation,
        ),
    )
