"""``headrace`` as a user calls it, in a home of its own, and what its processes weigh."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any, Self

import psutil

ROOT = Path(__file__).resolve().parents[2]
CLI = [sys.executable, "-m", "services.cli.main"]
SAMPLE_S = 1.0


@dataclass
class Finished:
    """A command that has ended; ``started_ns`` is on the spans' clock, ``pss`` bytes by process."""

    status: int
    stdout: str
    stderr: str
    started_ns: int
    seconds: float
    pss: dict[str, int] = field(default_factory=dict)

    @property
    def json(self) -> Any:
        """The one JSON value on stdout."""
        assert self.stdout.strip(), f"status {self.status}\n{self.stderr}"
        return json.loads(self.stdout)


@dataclass(frozen=True)
class Home:
    """A ``$HEADRACE_HOME``."""

    path: Path

    def environment(self, **extra: str) -> dict[str, str]:
        """For a command in this home."""
        path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
        return {**os.environ, "PYTHONPATH": path, "HEADRACE_HOME": str(self.path), **extra}

    def headrace(self, *args: str, timeout: float = 180, weigh: bool = False, **env: str) -> Finished:
        """Run ``headrace ARGS`` to its end; with ``weigh`` its processes are weighed meanwhile."""
        began, started = time.monotonic(), time.time_ns()
        process = subprocess.Popen(
            [*CLI, *args], env=self.environment(**env), cwd=self.path.parent, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        with Scales(process.pid, self.path) if weigh else contextlib.nullcontext() as scales:
            try:
                stdout, stderr = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        seconds = time.monotonic() - began
        heaviest = scales.heaviest if scales is not None else {}
        return Finished(process.returncode, stdout, stderr, started, seconds, heaviest)

    def run(self, name: str) -> Path:
        """The folder of a run."""
        return self.path / "runs" / name

    def left(self, seconds: float = 10.0) -> list[psutil.Process]:
        """Processes of this home that are still there after ``seconds`` (Redis leaves 2 s after its user)."""
        end = time.monotonic() + seconds
        while (found := _carriers(self.path)) and time.monotonic() < end:
            time.sleep(0.1)
        return found


class Scales:
    """Weighs a command's processes every second: those below it, and those that carry its home."""

    def __init__(self, pid: int, home: Path) -> None:
        self._pid, self._home = pid, home
        self._stop = Event()
        self._thread = Thread(target=self._forever, daemon=True)
        self.heaviest: dict[str, int] = {}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def _forever(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            found = self._weigh()
            if sum(found.values()) > sum(self.heaviest.values()):
                self.heaviest = found

    def _weigh(self) -> dict[str, int]:
        # Redis and vLLM rewrite their titles, and with them the environment that one sees: found as children.
        processes: dict[int, psutil.Process] = {}
        with contextlib.suppress(psutil.Error):
            processes[self._pid] = psutil.Process(self._pid)
        processes.update({p.pid: p for p in _carriers(self._home)})
        for process in list(processes.values()):
            with contextlib.suppress(psutil.Error):
                processes.update({p.pid: p for p in process.children(recursive=True)})
        found: dict[str, int] = {}
        for pid, process in processes.items():
            with contextlib.suppress(psutil.Error):
                found[f"{pid} {_title(process)}"] = process.memory_full_info().pss
        return found


def _carriers(home: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HEADRACE_HOME") == str(home) and process.status() != "zombie":
                found.append(process)
    return found


def _title(process: psutil.Process) -> str:
    parts = " ".join(process.cmdline()).split()
    return " ".join(Path(part).name if part.startswith("/") else part for part in parts)[:80]
