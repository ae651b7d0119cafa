"""``policy.generation``: how the engine samples, and how vLLM is started."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from services.recipe.section import Fraction, NotNegativeFloat, Positive, PositiveFloat, Section


class VllmCfg(Section):
    """vLLM settings that recipes name; everything else goes through ``vllm_kwargs``."""

    async_engine: bool = True
    """Headrace always drives vLLM's AsyncLLM."""
    precision: str | None = None
    """Null: ``policy.precision``."""
    kv_cache_dtype: str = "auto"
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = "processed_logprobs"
    tensor_parallel_size: Positive = 1
    pipeline_parallel_size: Positive = 1
    expert_parallel_size: Positive = 1
    gpu_memory_utilization: float = Field(default=0.6, gt=0.0, le=1.0)
    max_model_len: Positive | None = None
    """Null: ``policy.max_total_sequence_length``."""
    enforce_eager: bool = False
    load_format: Literal["auto", "dummy", "safetensors"] = "auto"
    """The base model is read from disk, so that version 0 is what it says."""
    enable_prefix_caching: bool | None = None
    """Null: vLLM's own default."""
    skip_tokenizer_init: bool = False
    expose_http_server: bool = False
    http_server_serving_chat_kwargs: dict[str, Any] = {}
    cap_max_tokens_to_context: bool = True
    enable_vllm_metrics_logger: bool = False
    vllm_metrics_logger_interval: PositiveFloat = 0.5
    reset_encoder_cache_after_weight_update: bool = False
    use_deep_gemm: bool = False
    num_last_layers_in_bf16: int = 0
    num_first_layers_in_bf16: int = 0


class ColocatedResources(Section):
    """What generation takes of the cluster when it does not share the trainer's devices."""

    gpus_per_node: Positive | None = None
    num_nodes: Positive | None = None


class Colocated(Section):
    """Whether trainer and engine share devices."""

    enabled: bool = True
    resources: ColocatedResources = ColocatedResources()


class Generation(Section):
    """Sampling parameters are always sent in full: a model's generation_config never fills them in."""

    backend: Literal["vllm"] = "vllm"
    max_new_tokens: Positive = 512
    temperature: PositiveFloat = 1.0
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=-1)
    """Null, -1 and 0 are off."""
    min_p: Fraction = 0.0
    val_temperature: NotNegativeFloat | None = None
    """Null takes the training value, as for the other val_ keys; 0 is greedy."""
    val_top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    val_top_k: int | None = Field(default=None, ge=-1)
    val_max_new_tokens: Positive | None = None
    stop_token_ids: list[int] | None = None
    stop_strings: list[str] | None = None
    bad_words: list[str] | None = None
    refit_transport: str | None = None
    """NeMo RL's name for ``stack.transport``; null takes that."""
    vllm_cfg: VllmCfg = VllmCfg()
    vllm_kwargs: dict[str, Any] = {}
    """Handed to vLLM's engine arguments as they stand."""
    colocated: Colocated = Colocated()
