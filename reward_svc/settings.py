"""Settings of the reward service (``HEADRACE_REWARD_…``)."""

from __future__ import annotations

from pydantic import Field

from services.runtime.settings import ServiceSettings, service_config


class RewardSettings(ServiceSettings):
    """Where it listens, and how verifiers are isolated."""

    model_config = service_config("reward")

    listen: str = "127.0.0.1:7003"
    workers: int = Field(default=2, ge=1, le=1024)
    """Killable verifier processes; started when a run needs them."""
    time_limit_s: float = Field(default=10.0, gt=0, le=600)
    """For one item, unless the recipe says otherwise."""
