"""What a supervisor says of its processes: one small file that other commands read.

Invariants: written whole at every change and removed at an orderly end; it is believed only while its writer
holds the stack's (or the run's) lock, because a killed writer leaves it behind.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from services.runtime.home import write_atomic

STARTING, READY, STOPPING, FAILED = "starting", "ready", "stopping", "failed"


@dataclass(frozen=True, slots=True)
class Row:
    """One process; ``pid`` is 0 while it waits for its restart."""

    name: str
    service: str
    pid: int
    ready: bool
    restarts: int
    address: str
    log: str


@dataclass(slots=True)
class Board:
    """The file at ``path``; ``rows`` tells the processes of the moment."""

    path: Path
    stack: str
    rows: Callable[[], list[Row]]
    state: str = STARTING
    error: str = ""
    notice: dict[str, Any] = field(default_factory=dict)
    """Answer to the request that was last carried out."""
    _created: float = field(default_factory=time.time)

    def write(self, state: str | None = None, error: str = "") -> None:
        """Say how things are now."""
        self.state = state or self.state
        self.error = error or self.error
        found = {
            "stack": self.stack,
            "pid": os.getpid(),
            "state": self.state,
            "error": self.error,
            "created": self._created,
            "notice": self.notice,
            "processes": [asdict(row) for row in self.rows()],
        }
        write_atomic(self.path, json.dumps(found))

    def remove(self) -> None:
        """The end; what failed stays to be read."""
        if self.state == FAILED:
            self.write()
        else:
            self.path.unlink(missing_ok=True)


def read_board(path: Path) -> dict[str, Any] | None:
    """What the file says; None without one."""
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return found
