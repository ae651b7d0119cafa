"""``data``, ``env``, ``logger``, ``cluster`` and ``checkpointing``."""

from __future__ import annotations

import re
from typing import Any

from pydantic import ConfigDict, field_validator

from services.recipe.section import NotNegative, Positive, PositiveFloat, Section

_MUST_SAVE_BY = re.compile(r"(\d+):([01]?\d|2[0-3]):([0-5]?\d):([0-5]?\d)")


class DataSource(Section):
    """Rows of a Gym JSONL file."""

    data_path: str
    """Relative to the working directory."""
    agent: str | None = None
    """Agent of rows without ``agent_ref``; null: ``single_turn``, for kind sft ``supervised``."""
    dataset_name: str | None = None
    env_name: str | None = None


class Data(Section):
    """Training and validation rows."""

    train: DataSource
    validation: DataSource | None = None
    shuffle: bool = True
    max_input_seq_length: Positive | None = None
    """Tokens of a prompt; longer rows are refused. Null: no limit beyond the model's."""
    num_workers: NotNegative = 1
    use_multiple_dataloader: bool = False
    default: dict[str, Any] = {}


class Verifier(Section):
    """Settings of one verifier, by its name."""

    timeout_s: PositiveFloat | None = None
    """Seconds for one answer; null: the verifier's own limit."""
    options: dict[str, Any] = {}


class Environment(Section):
    """One environment: the verifier that scores rows naming it, and how many turns an episode has."""

    verifier: str | None = None
    max_turns: Positive | None = None
    system_prompt: str | None = None
    options: dict[str, Any] = {}


class NemoGym(Section):
    """NeMo Gym's own configuration; inline blocks are kept as they stand."""

    model_config = ConfigDict(extra="allow")

    config_paths: list[str] = []


class Env(Section):
    """Environments and verifiers."""

    default_verifier: str | None = None
    """Scores rows that name none; null refuses such rows."""
    environments: dict[str, Environment] = {}
    verifiers: dict[str, Verifier] = {}
    verifier_timeout_s: PositiveFloat = 10.0
    should_use_nemo_gym: bool = False
    should_log_nemo_gym_responses: bool = False
    should_mask_flagged_samples: bool = False
    nemo_gym: NemoGym = NemoGym()


class Logger(Section):
    """Where metrics go besides the run's own record."""

    log_dir: str | None = None
    num_val_samples_to_print: NotNegative = 0
    wandb_enabled: bool = False
    tensorboard_enabled: bool = False
    mlflow_enabled: bool = False
    swanlab_enabled: bool = False
    monitor_gpus: bool = False
    wandb: dict[str, Any] = {}
    tensorboard: dict[str, Any] = {}
    mlflow: dict[str, Any] = {}
    swanlab: dict[str, Any] = {}
    gpu_monitoring: dict[str, Any] = {}


class Cluster(Section):
    """Machines of a run; 0 GPUs is the CPU."""

    gpus_per_node: NotNegative = 0
    num_nodes: Positive = 1
    segment_size: Positive | None = None
    master_port_range: list[int] | None = None


class Checkpointing(Section):
    """When checkpoints are written and which are kept; see ``step_N`` below ``checkpoint_dir``."""

    enabled: bool = True
    checkpoint_dir: str | None = None
    """Null: the run's own folder."""
    save_period: Positive = 10
    ft_save_period: Positive | None = None
    ft_keep_latest_k: Positive | None = None
    keep_top_k: Positive | None = 3
    """Best by ``metric_name`` among the periodic ones, most recent ones without; null keeps all."""
    metric_name: str | None = None
    """``val:KEY`` or ``train:KEY``."""
    higher_is_better: bool = True
    checkpoint_must_save_by: str | None = None
    """``DD:HH:MM:SS`` of wall clock after which the run saves once and stops."""
    save_optimizer: bool = True
    save_consolidated: bool = False
    model_save_format: str = "safetensors"
    export_dir: str | None = None
    """A Hugging Face directory of the final weights, written at the end of the run."""

    @field_validator("metric_name")
    @classmethod
    def _has_source(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"(val|train):.+", value):
            raise ValueError("must be val:KEY or train:KEY")
        return value

    @field_validator("checkpoint_must_save_by")
    @classmethod
    def _is_duration(cls, value: str | None) -> str | None:
        if value is not None and not _MUST_SAVE_BY.fullmatch(value):
            raise ValueError("must be DD:HH:MM:SS, in quotes")
        return value

    @property
    def must_save_after_s(self) -> float | None:
        """``checkpoint_must_save_by`` in seconds."""
        if self.checkpoint_must_save_by is None:
            return None
        days, hours, minutes, seconds = (int(part) for part in self.checkpoint_must_save_by.split(":"))
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
