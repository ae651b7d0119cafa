"""``stack``: Headrace's own part of a recipe: processes, budgets and time limits."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.recipe.section import NotNegative, Positive, PositiveFloat, Section

Port = int | None


class Ports(Section):
    """Fixed ports of the embedded stack; null takes a free one."""

    controller: Port = Field(default=None, ge=0, le=65535)
    buffer: Port = Field(default=None, ge=0, le=65535)
    gym: Port = Field(default=None, ge=0, le=65535)
    reward: Port = Field(default=None, ge=0, le=65535)
    rollout: Port = Field(default=None, ge=0, le=65535)
    trainer: Port = Field(default=None, ge=0, le=65535)
    refit: Port = Field(default=None, ge=0, le=65535)


class Replicas(Section):
    """Processes of each light service."""

    buffer: Positive = 1
    gym: Positive = 1
    reward: Positive = 1


class Threads(Section):
    """CPU threads of the heavy processes; null leaves the choice to the libraries."""

    engine: Positive | None = None
    trainer: Positive | None = None


class Stack(Section):
    """Seconds where a name ends in ``_s``."""

    ports: Ports = Ports()
    replicas: Replicas = Replicas()
    engines: Positive = 1
    min_engines: Positive = 1
    """Healthy engines without which a run cannot go on."""
    trainer_processes: Positive = 1
    """Ranks of the trainer's torchrun job."""
    rescore_samples: NotNegative | None = 32
    """W >= 1: samples per step whose older tokens are scored under the version that sampled them, for
    ``token_mult_prob_error``; null is all, 0 is off (then it is of tokens of the current version only)."""
    threads: Threads = Threads()
    gym_concurrency: Positive = 128
    """Samples in flight in one gym worker."""
    reward_workers: Positive = 1
    """Killable processes for CPU-heavy verifiers."""
    transport: Literal["shm", "cuda_ipc", "nccl"] = "shm"
    probe_tolerance: PositiveFloat = 0.05
    """Largest |log-probability difference| between trainer and engine that a probe accepts."""
    probe_sequences: Positive = 4
    probe_tokens: Positive = 16
    """Upper bound on the tokens of one probe sequence."""
    order: Literal["in_order", "ready_first"] = "in_order"
    """Which groups a step takes: its own (a straggler blocks it), or ready ones of later open steps in the
    stragglers' place. ``ready_first`` needs ``grpo.async_grpo``."""
    validation_engines: Positive = 1
    """Engines set aside for a validation pass while training goes on; used when there are more."""
    sample_timeout_s: PositiveFloat | None = None
    """Longest time of one try of one sample; what takes longer counts as a failure of its environment."""
    claim_timeout_s: PositiveFloat = 30.0
    """A claim without heartbeat for so long is given to somebody else."""
    infrastructure_attempts: Positive = 5
    """Tries of one sample that ended by infrastructure, before its group is dropped."""
    data_attempts: Positive = 2
    """Tries of one sample that ended by environment or verifier."""
    minimum_siblings: NotNegative = 0
    """Fewest usable siblings of an admitted group; 0 is all of them."""
    prefetch_steps: NotNegative = 2
    """kind sft: steps whose conversations are rendered ahead of training."""
    step_timeout_s: PositiveFloat = 3600.0
    """Longest wait of one step for its samples."""
    engine_start_timeout_s: PositiveFloat = 600.0
    trainer_start_timeout_s: PositiveFloat = 600.0
    service_start_timeout_s: PositiveFloat = 60.0
    drain_seconds: PositiveFloat = 10.0
    max_restarts: NotNegative = 5
    """Restarts of one process within ``restart_window_s`` before the run fails."""
    restart_window_s: PositiveFloat = 300.0
    on_restore: Literal["replay", "regenerate"] = "replay"
    trace: bool = True
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    redis_url: str | None = None
    """Null: the embedded Redis of ``$HEADRACE_HOME``."""
