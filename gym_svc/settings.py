"""Settings of the gym (``HEADRACE_GYM_…``)."""

from __future__ import annotations

from pydantic import Field

from services.runtime.settings import ServiceSettings, service_config


class GymSettings(ServiceSettings):
    """Where the gym's peers are (HOST:PORT), and how much it does at once."""

    model_config = service_config("gym")

    listen: str = "127.0.0.1:7002"
    buffer: str = "127.0.0.1:7001"
    reward: str = "127.0.0.1:7003"
    rollout: str = "127.0.0.1:7004"
    concurrency: int = Field(default=64, ge=1, le=65536)
    """Samples in flight at most, unless Setup says otherwise."""
