"""Settings of an engine (``HEADRACE_ENGINE_…``), read by the host and handed to its worker by environment."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.runtime.settings import ServiceSettings, service_config


class EngineSettings(ServiceSettings):
    """An engine host and its worker."""

    model_config = service_config("engine")

    listen: str = "127.0.0.1:7007"
    refit: str = "127.0.0.1:7006"
    """The bridge whose roster the engine joins."""
    backend: Literal["vllm", "render"] = "vllm"
    """``render`` tokenises and renders but holds no model."""
    kv_cache_mib: int = Field(default=64, ge=1)
    """KV cache on a CPU; on a GPU the recipe's gpu_memory_utilization counts."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Turns in one batch on a CPU, unless the recipe's vllm_kwargs say otherwise."""
    threads: int = Field(default=1, ge=1)
    """Compute threads on a CPU. More than one collapses as soon as another process wants a core."""
    heartbeat_seconds: float = Field(default=1.0, gt=0, le=60)
    start_seconds: float | None = Field(default=None, gt=0)
    """How long a worker may take from its run to its first call; None: 120 s on a CPU, 1800 s on a GPU."""
    stop_seconds: float = Field(default=8.0, ge=0)
    """How long a worker may take to end before it is killed; a leaving engine's drain comes on top."""
    hold_seconds: float = Field(default=120.0, gt=0)
    """How long an in-flight update of which nothing more is heard may keep turns waiting."""
