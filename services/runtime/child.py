"""One supervised child process; see :mod:`services.runtime.supervise` for the rules."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.runtime.errors import Internal
from services.runtime.spawn import wrap
from services.runtime.sweep import TOKEN_KEY, sweep
from services.runtime.sweeper import Sweeper

TAIL_BYTES = 4096
TAIL_LINES = 8
# gRPC core reads it at import, so it must be set from outside: goodbye messages are no news.
_QUIET = {"GRPC_VERBOSITY": "ERROR"}


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to run. ``env`` is laid over this process's environment; logs are appended to ``log_file``."""

    name: str
    argv: Sequence[str]
    log_file: Path
    env: Mapping[str, str] = field(default_factory=dict)
    ready_file: Path | None = None
    """Written by the child once it is ready; without one it is ready when started."""
    restart: bool = True
    start_timeout: float = 60.0
    stop_timeout: float = 15.0
    stop_stage: int = 0
    """Lower stages are stopped first; those of one stage together."""
    cwd: Path | None = None


@dataclass(frozen=True, slots=True)
class ProcessEvent:
    """``kind`` is started, ready, exited or stopped."""

    kind: str
    name: str
    pid: int
    restarts: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """A process at one moment; ``exit_status`` is negative for a signal, None while none has ended."""

    name: str
    pid: int
    running: bool
    ready: bool
    restarts: int
    exit_status: int | None


class Child:
    """State of one process across its restarts."""

    def __init__(self, spec: ProcessSpec, sweeper: Sweeper) -> None:
        self.spec = spec
        self._sweeper = sweeper
        self._lives = 0
        self.ready = False
        self.was_ready = False
        """Whether the life that ended last had been ready."""
        self.record: Mapping[str, Any] = {}
        self.restarts = 0
        self.restart_at: float | None = None
        self.exit_status: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._exits: deque[float] = deque(maxlen=1000)
        self.pid = 0

    @property
    def running(self) -> bool:
        """Whether there is a process that has not been reaped."""
        return self._process is not None

    @property
    def where(self) -> str:
        """The log file, for errors."""
        return str(self.spec.log_file)

    def status(self) -> ProcessStatus:
        """The process at this moment."""
        return ProcessStatus(
            self.spec.name, self.pid, self.running, self.ready, self.restarts, self.exit_status
        )

    def spawn(self) -> None:
        """Start the process; from the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            raise Internal("Processes are spawned from the main thread only", where=self.spec.name)
        if self.restart_at is not None:
            self.restarts += 1
            self.restart_at = None
        if self.spec.ready_file is not None:
            self.spec.ready_file.unlink(missing_ok=True)
        self.spec.log_file.parent.mkdir(parents=True, exist_ok=True)
        self._lives += 1
        with self.spec.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                wrap(self.spec.argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**_QUIET, **os.environ, **self.spec.env, TOKEN_KEY: self._token()},
                cwd=self.spec.cwd,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._sweeper.added(self.pid)
        self._started = time.monotonic()
        self.ready = self.spec.ready_file is None

    def check_ready(self) -> bool:
        """Whether the ready file is there now; reads it."""
        file = self.spec.ready_file
        if file is None or not file.exists():
            return False
        try:
            self.record = json.loads(file.read_bytes())
        except ValueError:
            return False  # a program of somebody else writes it in two steps; the start has its own limit
        self.ready = True
        return True

    def late(self) -> bool:
        """Whether the process has not become ready in its time."""
        return self.running and not self.ready and time.monotonic() - self._started > self.spec.start_timeout

    def reap(self) -> bool:
        """Whether the process has ended; then its group is swept and it is reaped."""
        if self._process is None:
            return False
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            return False
        self._finish()
        return True

    def terminate(self) -> None:
        """Ask the process (not its group: it knows the order) to end."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL the group and reap; no-op when the process has ended."""
        if self._process is not None:
            self._finish()

    def exits_within(self, seconds: float) -> int:
        """How often the process ended within the last ``seconds``."""
        return sum(1 for at in self._exits if time.monotonic() - at <= seconds)

    def describe_exit(self) -> str:
        """``ended by SIGKILL`` or ``ended with status 1``."""
        if self.exit_status is not None and self.exit_status < 0:
            return f"ended by {signal.Signals(-self.exit_status).name}"
        return f"ended with status {self.exit_status}"

    def tail(self) -> str:
        """The last lines of the log, joined by `` | ``."""
        return " | ".join(self._lines()[-TAIL_LINES:])

    def last_line(self) -> str:
        """The last line of the log."""
        lines = self._lines()
        return lines[-1] if lines else ""

    def _lines(self) -> list[str]:
        if not self.spec.log_file.exists():
            return []
        with self.spec.log_file.open("rb") as file:
            file.seek(max(0, self.spec.log_file.stat().st_size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()]

    def _token(self) -> str:
        # One per life, so that sweeping after one never touches the next; all begin with the stack's.
        return f"{self._sweeper.token}:{self.spec.name}:{self._lives};"

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _finish(self) -> None:
        assert self._process is not None, "only a running child is finished"
        self._signal_group(signal.SIGKILL)
        sweep(self._token(), {self.pid})
        self._sweeper.removed(self.pid)
        self.exit_status = self._process.wait(timeout=10)
        self._process = None
        self.was_ready, self.ready = self.ready, False
        self._exits.append(time.monotonic())
