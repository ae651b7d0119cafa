"""Starts vLLM inside a worker process: what to import, the model's class, the fork, the tokenizer.

Invariants
- On a CPU, EngineCore is *forked* from this process, which has imported everything: 3 s instead of 30. That
  needs the main thread, no gRPC thread before it, one compute thread, and the start method set only after
  create_engine_config (which forces spawn). On a GPU vLLM's own way, spawn, is kept: CUDA survives no fork.
"""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path

from rollout_svc.engine.arguments import engine_arguments
from rollout_svc.engine.core import EngineCore
from rollout_svc.engine.environment import is_cpu_build
from rollout_svc.engine.policy import EnginePolicy
from rollout_svc.engine.settings import EngineSettings
from rollout_svc.engine.tokenizer import check_model, first_line
from services.runtime.errors import HeadraceError, InvalidInput
from services.runtime.logs import get_logger

# What a start imports lazily; done while the worker waits for its run.
_WARM = (
    "vllm", "vllm.v1.engine.async_llm", "vllm.v1.executor.uniproc_executor", "vllm.v1.engine.core",
    "vllm.v1.core.sched.scheduler", "vllm.model_executor.models.qwen3", "vllm.renderers.hf",
)  # fmt: skip
_WARM_CPU = ("vllm.v1.worker.cpu_worker", "vllm.v1.attention.backends.cpu_attn")


def warm() -> None:
    """Import what an engine needs."""
    log = get_logger("engine")
    for name in (*_WARM, *(_WARM_CPU if is_cpu_build() else ())):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as exc:
            # Modules move between vLLM versions; a missing one is imported later, by vLLM itself.
            log.info("not warmed", module=name, why=str(exc))
    if is_cpu_build():
        import torch

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def launch(policy: EnginePolicy, settings: EngineSettings, *, seed: int, stops: list[int]) -> EngineCore:
    """Start AsyncLLM; call it on the running event loop of the main thread. Raises InvalidInput."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor import Executor

    cpu = is_cpu_build()
    check_model(policy.model, "policy.model_name")
    args = engine_arguments(
        policy, cpu=cpu, seed=seed, kv_cache_mib=settings.kv_cache_mib, max_num_seqs=settings.max_num_seqs
    )
    if cpu:
        _register_architectures(policy.model)
    try:
        config = AsyncEngineArgs(**args).create_engine_config()
    except (OSError, ValueError, TypeError) as exc:
        raise InvalidInput(f"vLLM refuses the engine's arguments: {first_line(exc)}", where="policy") from exc
    if cpu:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    try:
        llm = AsyncLLM(
            vllm_config=config,
            executor_class=Executor.get_class(config),
            log_stats=False,
            log_requests=False,
        )
    except HeadraceError:
        raise
    except (RuntimeError, ValueError) as exc:
        raise InvalidInput(
            f"vLLM does not start: {first_line(exc)}", where=policy.model, do="See the engine's log."
        ) from exc
    return EngineCore(llm, stop_ids=stops)


def _register_architectures(model: str) -> None:
    """Register the model's class in this process.

    Otherwise vLLM inspects it in a subprocess that imports vLLM again: 18 s with an empty cache.
    """
    from vllm.model_executor.models import registry

    config = Path(model) / "config.json"
    names = json.loads(config.read_text(encoding="utf-8")).get("architectures") if config.is_file() else None
    for name in names or ():
        known = registry.ModelRegistry.models.get(name)
        module = getattr(known, "module_name", None)
        if module is None:
            continue  # unknown to vLLM, which says so itself, or registered already
        cls = getattr(importlib.import_module(module), known.class_name)
        registry.ModelRegistry.register_model(name, cls)
