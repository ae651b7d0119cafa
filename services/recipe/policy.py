"""``policy``: the model, its optimizer, how it is trained and how it generates."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator

from services.recipe.generation import Generation
from services.recipe.section import NotNegative, Positive, PositiveFloat, Section


class Tokenizer(Section):
    """Null name: the model's own tokenizer."""

    name: str | None = None
    chat_template: str | None = None
    """Null: the tokenizer's own template; otherwise a path or the template itself."""
    chat_template_kwargs: dict[str, Any] = {}


class Optimizer(Section):
    """A torch optimizer by dotted name."""

    name: str = "torch.optim.AdamW"
    kwargs: dict[str, Any] = {"lr": 5.0e-6, "weight_decay": 0.01, "betas": [0.9, 0.999], "eps": 1.0e-8}


class Schedule(Section):
    """A torch learning-rate scheduler by dotted name, or the milestones that join the ones above it."""

    name: str | None = None
    kwargs: dict[str, Any] = {}
    milestones: list[NotNegative] | None = None


class MoeParallelizer(Section):
    """Expert-parallel training."""

    ignore_router_for_ac: bool = False
    reshard_after_forward: bool = False


class AutomodelCfg(Section):
    """The DTensor backend; ``dtensor_cfg`` is an alias of this section."""

    enabled: bool = True
    v2: bool = Field(default=True, alias="_v2")
    cpu_offload: bool = False
    sequence_parallel: bool = False
    activation_checkpointing: bool = False
    tensor_parallel_size: Positive = 1
    context_parallel_size: Positive = 1
    expert_parallel_size: Positive = 1
    custom_parallel_plan: str | None = None
    automodel_kwargs: dict[str, Any] = {}
    moe_parallelizer: MoeParallelizer = MoeParallelizer()
    lora_cfg: dict[str, Any] = {}
    env_vars: dict[str, str] = {}


class MegatronCfg(Section):
    """The Megatron backend; its sub-keys are kept so that recipes load, and it cannot be turned on."""

    model_config = ConfigDict(extra="allow")

    enabled: bool = False


class DynamicBatching(Section):
    """Micro batches by tokens instead of by sequences."""

    enabled: bool = False
    train_mb_tokens: Positive | None = None
    logprob_mb_tokens: Positive | None = None
    sequence_length_round: Positive = 64


class SequencePacking(Section):
    """Several sequences in one row."""

    enabled: bool = False
    train_mb_tokens: Positive | None = None
    logprob_mb_tokens: Positive | None = None
    algorithm: str = "modified_first_fit_decreasing"
    sequence_length_round: Positive = 64


class Policy(Section):
    """Sizes count sequences unless they say tokens."""

    model_name: str
    """A local Hugging Face directory, or the id of a model in the local Hugging Face cache."""
    tokenizer: Tokenizer = Tokenizer()
    hf_config_overrides: dict[str, Any] = {}
    train_global_batch_size: Positive = 512
    """Samples of one optimizer step."""
    train_micro_batch_size: Positive = 4
    logprob_batch_size: Positive | None = None
    """Null: train_micro_batch_size."""
    generation_batch_size: Positive | None = None
    logprob_chunk_size: Positive | None = None
    max_total_sequence_length: Positive = 512
    """Prompt and answer together, in tokens."""
    precision: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    """Of forward and backward; master weights and optimizer are FP32."""
    offload_optimizer_for_logprob: bool = False
    automodel_cfg: AutomodelCfg = AutomodelCfg()
    megatron_cfg: MegatronCfg = MegatronCfg()
    dynamic_batching: DynamicBatching = DynamicBatching()
    sequence_packing: SequencePacking = SequencePacking()
    make_sequence_length_divisible_by: Positive = 1
    max_grad_norm: PositiveFloat | None = 1.0
    optimizer: Optimizer = Optimizer()
    scheduler: list[Schedule] = []
    """Empty: a constant learning rate."""
    refit_buffer_size_gb: PositiveFloat | None = None
    is_vlm: bool = False
    draft: dict[str, Any] = {}
    router_replay: dict[str, Any] = {}
    generation: Generation = Generation()

    @field_validator("scheduler", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, dict) else value
