"""A service started by ``headrace serve NAME``, alone, on a free port."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from services.cli.roster import SERVICES


@dataclass
class Served:
    """A service process that listens; ``seconds`` and ``cpu_s`` are what it took to be ready."""

    process: subprocess.Popen[bytes]
    address: str
    seconds: float
    cpu_s: float
    log: Path


@contextlib.contextmanager
def serving(name: str, home: Path, patience: float, *, host: str = "127.0.0.1") -> Iterator[Served]:
    """``headrace serve NAME`` on a free port, up to its ready file."""
    ready, log, prefix = home / "ready.json", home / "log", SERVICES[name].prefix
    env = {
        **os.environ, f"{prefix}LISTEN": f"{host}:0", f"{prefix}READY_FILE": str(ready),
        "HEADRACE_HOME": str(home / "home"),
    }  # fmt: skip
    began = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.cli.main", "serve", name], env=env, stdout=out, stderr=out
        )
    try:
        while not ready.exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() - began < patience, log.read_text()
            time.sleep(0.01)
        seconds = time.monotonic() - began
        times = psutil.Process(process.pid).cpu_times()
        address = json.loads(ready.read_text())["address"]
        yield Served(process, address, seconds, times.user + times.system, log)
    finally:
        process.kill()
        process.wait(10)
