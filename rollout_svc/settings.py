"""Settings of the router (``HEADRACE_ROLLOUT_…``)."""

from __future__ import annotations

from pydantic import Field

from services.runtime.settings import ServiceSettings, service_config


class RouterSettings(ServiceSettings):
    """Where the roster comes from."""

    model_config = service_config("rollout")

    listen: str = "127.0.0.1:7004"
    refit: str = "127.0.0.1:7006"
    """The bridge whose roster the router watches."""
    affinity_samples: int = Field(default=65536, ge=1)
    """Samples whose engine is remembered."""
