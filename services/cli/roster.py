"""The services as the command line knows them: module, default port, and the addresses that each needs.

Imports nothing: a room is loaded by name, by the process that serves it.
"""

from __future__ import annotations

from typing import NamedTuple


class Service(NamedTuple):
    """One service; ``peers`` are the services whose address it takes as ``HEADRACE_<NAME>_<PEER>``."""

    name: str
    module: str
    port: int
    peers: tuple[str, ...] = ()
    redis: bool = False
    embedded: bool = True
    """Whether `headrace run` starts it."""

    @property
    def prefix(self) -> str:
        """Prefix of its settings."""
        return f"HEADRACE_{self.name.upper()}_"


SERVICES: dict[str, Service] = {
    service.name: service
    for service in (
        Service("refit", "refit_bridge.service", 7006, ("trainer", "rollout"), redis=True),
        Service("buffer", "services.buffer.service", 7001, redis=True),
        Service("trainer", "trainer_svc.service", 7005, ("buffer",)),
        Service("engine", "rollout_svc.engine.service", 7007, ("refit",)),
        Service("rollout", "rollout_svc.service", 7004, ("refit",)),
        Service("reward", "reward_svc.service", 7003),
        Service("gym", "gym_svc.service", 7002, ("buffer", "rollout", "reward")),
        Service(
            "controller", "services.controller.service", 7000,
            ("buffer", "reward", "rollout", "trainer", "refit"), redis=True,
        ),
        Service(
            "gateway", "services.gateway.service", 7080,
            ("controller", "buffer", "gym", "reward", "rollout", "trainer", "refit"), embedded=False,
        ),
    )
}  # fmt: skip
"""In the order of the start; the stop goes the other way, so that nobody loses what it talks to."""
