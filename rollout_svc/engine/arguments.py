"""Engine arguments of vLLM from the recipe.

Invariants
- ``vllm_kwargs`` come last and win, except over what Headrace's own promises rest on (``FIXED``).
- The model's generation_config never fills in sampling parameters.
- Keys of ``vllm_cfg`` that mean nothing here are listed; an unknown one is refused.
"""

from __future__ import annotations

from typing import Any

from rollout_svc.engine.policy import EnginePolicy
from services.runtime.errors import InvalidInput

FIXED: dict[str, Any] = {
    "generation_config": "vllm",
    "logprobs_mode": "processed_logprobs",
    # Scoring at another temperature than 1 needs the whole distribution.
    "max_logprobs": -1,
    "disable_log_stats": True,
    # A probe must not wait behind a backlog of turns.
    "scheduling_policy": "priority",
}
TRANSFER: dict[str, Any] = {
    "weight_transfer_config": {"backend": "headrace"},
    "worker_extension_cls": "refit_bridge.receiver.extension.RefitExtension",
}
_SAME_NAME = (
    "tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_utilization", "max_model_len",
    "enforce_eager", "enable_prefix_caching", "kv_cache_dtype", "load_format",
)  # fmt: skip
# Read elsewhere, or about parts of the NeMo RL engine that Headrace does not have.
_NOT_OURS = frozenset(
    {
        "precision", "logprobs_mode", "async_engine", "expose_http_server", "http_server_serving_chat_kwargs",
        "cap_max_tokens_to_context", "enable_vllm_metrics_logger", "vllm_metrics_logger_interval",
        "reset_encoder_cache_after_weight_update", "skip_tokenizer_init", "use_deep_gemm",
        "num_last_layers_in_bf16", "num_first_layers_in_bf16", "expert_parallel_size",
    }
)  # fmt: skip
PROBE_SLOTS = 4
"""Places in vLLM's batch that turns never take, so that a probe does not wait for one of them to end."""
CPU_BLOCK_SIZE = 32  # the default of 128 caches no short prompt


def engine_arguments(
    policy: EnginePolicy, *, cpu: bool, seed: int, kv_cache_mib: int, max_num_seqs: int
) -> dict[str, Any]:
    """Keywords for vLLM's AsyncEngineArgs; raises InvalidInput for a key that nobody knows."""
    cfg = policy.vllm_cfg
    unknown = sorted(set(cfg) - set(_SAME_NAME) - _NOT_OURS)
    if unknown:
        raise InvalidInput(
            f"Unknown key {unknown[0]}",
            where="policy.generation.vllm_cfg",
            do="Settings of vLLM itself go below vllm_kwargs.",
        )
    args: dict[str, Any] = {name: cfg[name] for name in _SAME_NAME if cfg.get(name) is not None}
    args["model"], args["tokenizer"] = policy.model, policy.tokenizer
    args["seed"] = seed & 0x7FFFFFFF
    args["dtype"] = cfg.get("precision") or ("float32" if cpu else policy.precision or "auto")
    if "max_model_len" not in args and policy.max_total_sequence_length:
        args["max_model_len"] = policy.max_total_sequence_length
    if int(cfg.get("expert_parallel_size") or 1) > 1:
        args["enable_expert_parallel"] = True
    if policy.hf_config_overrides:
        args["hf_overrides"] = policy.hf_config_overrides
    if cpu:
        args |= _cpu_arguments(kv_cache_mib, max_num_seqs)
    args = {**args, **TRANSFER, **policy.vllm_kwargs, **FIXED}
    if "max_num_seqs" in args:
        args["max_num_seqs"] = int(args["max_num_seqs"]) + PROBE_SLOTS
    return args


def _cpu_arguments(kv_cache_mib: int, max_num_seqs: int) -> dict[str, Any]:
    return {
        # Compilation costs a minute and g++; the worker's environment turns dynamo off altogether.
        "enforce_eager": True,
        "block_size": CPU_BLOCK_SIZE,
        # vLLM takes a seeded request's generator back after part of its prompt, which a CPU generator cannot
        # do: the engine dies. Whole prompts only.
        "enable_chunked_prefill": False,
        # Without it the worker claims a share of the machine's memory, or refuses to start.
        "kv_cache_memory_bytes": kv_cache_mib << 20,
        "max_num_seqs": max_num_seqs,
    }
