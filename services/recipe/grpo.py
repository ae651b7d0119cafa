"""``grpo`` and ``sft``: prompts per step, length of a run, and how rewards become advantages."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.recipe.section import Fraction, NotNegative, NotNegativeFloat, Positive, Section


class AsyncGrpo(Section):
    """Generation ahead of training; the synchronous loop is the case W = 0."""

    enabled: bool = False
    max_trajectory_age_steps: Positive = 1
    """W: train steps that a trajectory may lag behind."""
    max_generation_failures: NotNegative = 0
    in_flight_weight_updates: bool = False
    recompute_kv_cache_after_weight_updates: bool = False


class AdvEstimator(Section):
    """How rewards become advantages; null takes the value of the same key one level up."""

    name: Literal["grpo", "gdpo", "reinforce_plus_plus", "opd"] = "grpo"
    normalize_rewards: bool | None = None
    use_leave_one_out_baseline: bool | None = None
    minus_baseline: bool = True


class RewardScaling(Section):
    """Maps [source_min, source_max] linearly to [target_min, target_max], clamping outside."""

    enabled: bool = False
    source_min: float = 0.0
    source_max: float = 1.0
    target_min: float = 0.0
    target_max: float = 1.0


class RewardShaping(Section):
    """Soft punishment of long answers (DAPO); lengths in tokens."""

    enabled: bool = False
    overlong_buffer_length: NotNegative = 0
    overlong_buffer_penalty: NotNegativeFloat = 0.0
    max_response_length: NotNegative = 0
    stop_properly_penalty_coef: Fraction | None = None


class ValidationPlan(Section):
    """When a run validates."""

    val_period: int = Field(default=10, ge=-1)
    """Steps between validations; 0 or -1 is off."""
    val_start_at: int = -1
    """First step at which the period counts; -1 is from the start."""
    val_at_start: bool = False
    val_at_end: bool = False
    max_val_samples: Positive | None = None
    """Validation rows used, the first ones of the file; null is all (NeMo RL cuts at 256 in silence)."""
    val_batch_size: Positive = 256
    """Validation groups open at a time."""
    val_num_generations_per_prompt: Positive = 1


class Grpo(ValidationPlan):
    """Group relative policy optimisation."""

    num_prompts_per_step: Positive = 32
    num_generations_per_prompt: Positive = 16
    max_num_steps: Positive = 1_000_000
    max_num_epochs: Positive | None = None
    """Passes over the training rows; null leaves the end to max_num_steps."""
    max_rollout_turns: Positive = 1
    seed: NotNegative = 42
    normalize_rewards: bool = True
    """Divide advantages by the group's standard deviation."""
    use_leave_one_out_baseline: bool = True
    overlong_filtering: bool = False
    """Truncated samples keep their place in the baseline and do not train."""
    use_dynamic_sampling: bool = False
    dynamic_sampling_max_gen_batches: Positive = 10
    batch_multiplier: float = Field(default=1.0, ge=1.0)
    reward_scaling: RewardScaling = RewardScaling()
    reward_shaping: RewardShaping = RewardShaping()
    skip_reference_policy_logprobs_calculation: bool = False
    seq_logprob_error_threshold: NotNegativeFloat | None = None
    advantage_clip_low: float | None = None
    advantage_clip_high: float | None = None
    invalid_tool_call_advantage: float | None = None
    malformed_thinking_advantage: float | None = None
    adv_estimator: AdvEstimator = AdvEstimator()
    async_grpo: AsyncGrpo = AsyncGrpo()
    stop_at_validation_metric: str | None = None
    stop_at_validation_threshold: float | None = None
    deduplicate_multimodal_data: bool = False
    calculate_advantages_on_gpu: bool = False

    @property
    def normalizes_rewards(self) -> bool:
        """What the estimator uses: its own value, else the section's."""
        own = self.adv_estimator.normalize_rewards
        return self.normalize_rewards if own is None else own

    @property
    def leaves_one_out(self) -> bool:
        """What the estimator uses: its own value, else the section's."""
        own = self.adv_estimator.use_leave_one_out_baseline
        return self.use_leave_one_out_baseline if own is None else own


class Sft(Section):
    """Supervised fine-tuning on the assistant's tokens."""

    num_prompts_per_step: Positive = 128
    """Conversations of one step."""
    max_num_steps: Positive = 60
    max_num_epochs: Positive | None = None
    seed: NotNegative = 42
