"""``loss_fn``: the clipped policy-gradient loss, its KL penalty and its importance correction."""

from __future__ import annotations

from typing import Literal

from services.recipe.section import NotNegativeFloat, PositiveFloat, Section


class LossFn(Section):
    """Field names and defaults are NeMo RL's."""

    reference_policy_kl_penalty: NotNegativeFloat = 0.0
    """Beta. NeMo RL's base has 0.01; every recipe of the 3.5 models sets 0."""
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    kl_input_clamp_value: PositiveFloat | None = 20.0
    kl_output_clamp_value: PositiveFloat | None = 10.0
    ratio_clip_min: NotNegativeFloat = 0.2
    """The ratio is clipped below at 1 - ratio_clip_min."""
    ratio_clip_max: NotNegativeFloat = 0.2
    """The ratio is clipped above at 1 + ratio_clip_max."""
    ratio_clip_c: float | None = None
    """Dual clip: bounds the loss of negative advantages; above 1 or null."""
    token_level_loss: bool = True
    """Normalise over the tokens of the global batch; false: over sequences first."""
    sequence_level_importance_ratios: bool = False
    use_importance_sampling_correction: bool = False
    """Weigh tokens by the trainer's over the engine's probability."""
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = None
    truncated_importance_sampling_ratio: PositiveFloat | None = None
    truncated_importance_sampling_ratio_min: NotNegativeFloat | None = None
    use_on_policy_kl_approximation: bool = False
    use_kl_in_reward: bool = False
    force_on_policy_ratio: bool = False
    disable_ppo_ratio: bool = False
    use_cispo: bool = False
    positive_example_nll_weight: NotNegativeFloat = 0.0
