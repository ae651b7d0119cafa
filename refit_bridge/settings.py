"""Settings of the refit bridge (``HEADRACE_REFIT_…``)."""

from __future__ import annotations

from pydantic import Field

from services.runtime.settings import ServiceSettings, service_config


class RefitSettings(ServiceSettings):
    """Where the bridge's peers are (HOST:PORT), and how patient it is (seconds)."""

    model_config = service_config("refit")

    listen: str = "127.0.0.1:7006"
    redis_url: str | None = None
    """None: the embedded Redis of the home."""
    trainer: str = "127.0.0.1:7005"
    rollout: str = "127.0.0.1:7004"
    heartbeat_seconds: float = Field(default=2.0, gt=0, le=60)
    lost_after_seconds: float = Field(default=12.0, gt=0, le=600)
    """An engine whose heartbeats stop for so long is lost."""
    drain_seconds_engine: float = Field(default=90.0, gt=0, le=600)
    """How long a publish waits for turns in flight on an engine."""
    load_seconds: float = Field(default=300.0, gt=0, le=3600)
    """How long one chunk may take to load."""
    sync_retry_seconds: float = Field(default=2.0, gt=0, le=60)
    """Pause before a late engine whose sync failed is tried again."""
