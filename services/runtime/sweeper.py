"""The supervisor's side of :mod:`services.runtime.sweep`: one watching process per stack.

Invariant: the watcher carries no token itself and sits in a session of its own, so it survives the death of
the supervisor just long enough to clean up.
"""

from __future__ import annotations

import secrets
import subprocess
import sys
from pathlib import Path

from services.runtime import sweep

STOP_SECONDS = 10.0


class Sweeper:
    """Starts with the first session; ``close`` sweeps a last time."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(12)
        self._process: subprocess.Popen[bytes] | None = None

    def added(self, session: int) -> None:
        """The supervisor has started ``session``."""
        self._tell(f"+{session}\n")

    def removed(self, session: int) -> None:
        """``session`` has ended and is swept: its number may soon belong to somebody else."""
        self._tell(f"-{session}\n")

    def close(self) -> None:
        """End the watcher after a last sweep; idempotent."""
        if self._process is None:
            return
        watcher, self._process = self._process, None
        watcher.communicate(timeout=STOP_SECONDS)

    def _tell(self, line: str) -> None:
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
        assert self._process.stdin is not None, "opened as a pipe"
        self._process.stdin.write(line.encode())
        self._process.stdin.flush()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(sweep.__file__).resolve()), self.token],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
