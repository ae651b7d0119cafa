"""Settings of the gateway (``HEADRACE_GATEWAY_…``)."""

from __future__ import annotations

from pydantic import Field

from services.runtime.settings import ServiceSettings, service_config


class GatewaySettings(ServiceSettings):
    """Where the services are, and what one client may ask for."""

    model_config = service_config("gateway")

    listen: str = "127.0.0.1:7080"
    controller: str = "127.0.0.1:7000"
    buffer: str = "127.0.0.1:7001"
    gym: str = "127.0.0.1:7002"
    reward: str = "127.0.0.1:7003"
    rollout: str = "127.0.0.1:7004"
    trainer: str = "127.0.0.1:7005"
    refit: str = "127.0.0.1:7006"
    max_body_bytes: int = Field(default=4 * 1024 * 1024, ge=1024)
    """A larger request is refused before it is read."""
    max_streams: int = Field(default=64, ge=1)
    """Event streams open at a time."""
    cors_origins: str = ""
    """Origins whose pages may call, commas apart; empty: none but the gateway's own."""
    ping_seconds: float = Field(default=15.0, gt=0)
    """An event stream that has nothing to say sends a comment so often."""
