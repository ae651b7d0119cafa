"""``headrace run`` as a user starts it, in a home of its own; its processes, its store and its end.

The store is read without becoming a user of the embedded Redis: that would keep alive what a test wants to
see gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from services.controller.store import RunStore
from services.runtime import redis
from services.runtime.socket_dir import socket_path

ROOT = Path(__file__).resolve().parents[2]
CLI = [sys.executable, "-m", "services.cli.main"]
POLL_S = 0.02


class Headrace:
    """One life of the command; ``home`` outlives it."""

    def __init__(self, home: Path, *arguments: str) -> None:
        self.home = home
        home.mkdir(parents=True, exist_ok=True)
        self.log = home / "command.log"
        self._offset = len(self.log.read_text()) if self.log.exists() else 0
        self._seen: dict[int, psutil.Process] = {}
        self.seconds = 0.0
        """How long the command took, once it has ended."""
        self._started = time.monotonic()
        with self.log.open("ab") as log:
            self._command = subprocess.Popen(
                [*CLI, "run", *arguments, "--json"],
                stdout=subprocess.PIPE,
                stderr=log,
                env=_env(home),
                cwd=ROOT,
            )

    # -- where it is ------------------------------------------------------------------------------------

    @property
    def run(self) -> str:
        """The id of the run."""
        (found,) = [path.parent.name for path in (self.home / "runs").glob("*/recipe.yaml")]
        return found

    def completed(self) -> int:
        """Completed steps, as the store says now; -1 while it cannot say."""
        client = redis.connect_sync(f"unix://{socket_path(self.home)}")
        with contextlib.suppress(redis.redis_py.RedisError, ValueError), client:
            return int(client.hget(RunStore.key(self.run, "run"), "completed_steps") or 0)
        return -1

    def wait_for(self, condition: Callable[[], bool], seconds: float = 90.0, pause: float = POLL_S) -> None:
        """Until ``condition()``; fails when the command ends or the time is up."""
        end = time.monotonic() + seconds
        while not condition():
            assert self._command.poll() is None, f"the command ended:\n{self.tail()}"
            assert time.monotonic() < end, f"not within {seconds:g} s:\n{self.tail()}"
            time.sleep(pause)

    def kill_while(self, state: str, victim: Callable[[], psutil.Process]) -> psutil.Process:
        """SIGKILL ``victim()`` while something is in ``state``: ``claimed`` samples or ``leased`` groups.

        The process is stopped first and the state looked at again, so that it dies in the middle for certain.
        """
        process = victim()
        client = redis.connect_sync(f"unix://{socket_path(self.home)}")
        key, field = RunStore.key(self.run, "n:train"), "state:leased" if state == "leased" else state

        def caught() -> bool:
            if int(client.hget(key, field) or 0) == 0:
                return False
            process.suspend()
            if int(client.hget(key, field) or 0) > 0:
                return True
            process.resume()
            return False

        with client:
            self.wait_for(caught, pause=0.0)
        process.kill()
        return process

    def wait_for_step(self, steps: int, seconds: float = 90.0) -> None:
        """Until ``steps`` steps are complete."""
        self.wait_for(lambda: self.completed() >= steps, seconds)

    def wait_for_line(self, text: str, seconds: float = 90.0) -> None:
        """Until this life has printed a line that ends in ``text``."""
        self.wait_for(
            lambda: any(line.endswith(text) for line in self.log.read_text()[self._offset :].splitlines()),
            seconds,
        )

    def tail(self) -> str:
        """The last lines that it printed."""
        return "\n".join(self.log.read_text().splitlines()[-30:])

    # -- its processes ----------------------------------------------------------------------------------

    def processes(self) -> list[psutil.Process]:
        """Everything below the command, and what carries its home in its environment."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._command.pid).children(recursive=True):
                self._seen[process.pid] = process
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if (
                    process.environ().get("HEADRACE_HOME") == str(self.home)
                    and process.pid != self._command.pid
                ):
                    self._seen[process.pid] = process
        return [process for process in self._seen.values() if _lives(process)]

    def service(self, name: str) -> psutil.Process:
        """The process that the supervisor started for service ``name``."""
        return self._child(psutil.Process(self._command.pid), f" serve {name}")

    def engine_worker(self) -> psutil.Process:
        """The process of the engine that holds vLLM."""
        return self._child(self.service("engine"), "rollout_svc.engine.worker")

    def engine_core(self) -> psutil.Process:
        """vLLM's own process."""
        (core,) = self.engine_worker().children()
        return core

    def trainer_rank(self) -> psutil.Process:
        """The training process; its launcher is ``service("trainer")``."""
        return self._child(self.service("trainer"), "trainer_svc.rank", unlike="torch.distributed.run")

    def redis_keeper(self) -> psutil.Process:
        """The process that keeps the embedded Redis; Redis dies with it."""
        return next(each for each in self.processes() if "services.runtime.redis_keeper" in each.cmdline())

    @staticmethod
    def _child(parent: psutil.Process, text: str, unlike: str = "\0") -> psutil.Process:
        for process in parent.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                line = " ".join(process.cmdline())
                if text in line and unlike not in line and "spawn.py" not in line:
                    return process
        raise AssertionError(f"{parent} has no child {text!r}")

    # -- its end ----------------------------------------------------------------------------------------

    def kill(self) -> list[psutil.Process]:
        """SIGKILL of the command itself; what lived at that moment."""
        alive = self.processes()
        self._command.send_signal(signal.SIGKILL)
        self._command.wait(10)
        return alive

    def result(self, seconds: float = 150.0) -> dict[str, Any]:
        """The summary of a run that completes."""
        try:
            out, _ = self._command.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not complete within {seconds:g} s:\n{self.tail()}") from None
        self.seconds = time.monotonic() - self._started
        assert self._command.returncode == 0, f"exit status {self._command.returncode}:\n{self.tail()}"
        summary: dict[str, Any] = json.loads(out)
        return summary

    def close(self) -> None:
        """End whatever is still there."""
        if self._command.poll() is None:
            self._command.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._command.wait(40)
            self._command.kill()
            self._command.wait(10)

    # -- what stays -------------------------------------------------------------------------------------

    def steps(self) -> dict[int, dict[str, Any]]:
        """The per-step records."""
        return asyncio.run(self._read(lambda store: store.steps(self.run)))

    def redeliveries(self) -> int:
        """How many samples were handed out again."""

        async def read(client: Any) -> int:
            return int(await client.hget(RunStore.key(self.run, "n:train"), "redeliveries") or 0)

        return asyncio.run(self._with_client(read))

    def audit(self) -> dict[str, Any]:
        """``headrace runs audit last --json``."""
        done = subprocess.run(
            [*CLI, "runs", "audit", "last", "--json"],
            capture_output=True, text=True, env=_env(self.home), cwd=ROOT, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def weight_files(self) -> list[str]:
        """Files of this run in shared memory."""
        return [path.name for path in Path("/dev/shm").glob(f"headrace-{self.run}-*")]

    async def _read(self, question: Any) -> Any:
        async def read(client: Any) -> Any:
            return await question(RunStore(client))

        return await self._with_client(read)

    async def _with_client(self, work: Any) -> Any:
        with redis.acquire(self.home) as handle:
            client = redis.connect(handle.url)
            try:
                return await work(client)
            finally:
                await client.aclose()


@contextlib.contextmanager
def headrace(home: Path, *arguments: str) -> Iterator[Headrace]:
    """A command that ends with the block."""
    command = Headrace(home, *arguments)
    try:
        yield command
    finally:
        command.close()


def wait_gone(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those of ``processes`` that live after ``seconds``."""
    end = time.monotonic() + seconds
    while (left := [each for each in processes if _lives(each)]) and time.monotonic() < end:
        time.sleep(0.1)
    return left


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _env(home: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")}
    return {**kept, "HEADRACE_HOME": str(home), "PYTHONPATH": str(ROOT)}
