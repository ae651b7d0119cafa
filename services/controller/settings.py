"""Settings of the controller (``HEADRACE_CONTROLLER_…``)."""

from __future__ import annotations

from services.runtime.settings import ServiceSettings, service_config


class ControllerSettings(ServiceSettings):
    """Where the controller's peers are: HOST:PORT each; replicas of buffer and reward are commas apart."""

    model_config = service_config("controller")

    listen: str = "127.0.0.1:7000"
    redis_url: str | None = None
    """None: the embedded Redis of the home."""
    buffer: str = "127.0.0.1:7001"
    reward: str = "127.0.0.1:7003"
    rollout: str = "127.0.0.1:7004"
    trainer: str = "127.0.0.1:7005"
    refit: str = "127.0.0.1:7006"
    stack: str = "default"
    """Runs belong to the stack that they were submitted to; a controller takes up only its own."""
