"""Settings of the trainer (prefix ``HEADRACE_TRAINER_``)."""

from __future__ import annotations

import os

from pydantic import Field

from services.runtime.settings import ServiceSettings, service_config


class TrainerSettings(ServiceSettings):
    """Where to listen, where the buffer is, how many ranks and CPU threads."""

    model_config = service_config("TRAINER")

    listen: str = "127.0.0.1:7005"
    buffer: str = "127.0.0.1:7001"
    """HOST:PORT of the trajectory buffer."""
    nproc: int = Field(default=1, ge=1)
    """Ranks of the torchrun job."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of a rank; absent: all cores but one. Results are reproducible for a fixed number."""

    @property
    def cpu_threads(self) -> int:
        """Threads to use."""
        cores = len(os.sched_getaffinity(0))
        return self.threads or max(1, cores - 1)
