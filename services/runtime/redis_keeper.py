"""Keeps the embedded Redis of one home alive while somebody uses it: ``-m services.runtime.redis_keeper``.

Invariants
- One keeper per home (exclusive lock on ``keeper.lock``), in a session of its own: it outlives the process
  that started it, so that others can share the Redis.
- A *user* holds a shared lock on ``users.lock``, which the kernel releases even after SIGKILL. About two
  seconds after the last one has gone the keeper takes that lock for good, shuts Redis down and ends; whoever
  wants a Redis meanwhile waits for the lock and then starts a new keeper.
- Redis is the keeper's child with a death signal, and is restarted when it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from types import FrameType

from services.runtime.home import Home
from services.runtime.locks import FileLock
from services.runtime.spawn import wrap

IDLE_SECONDS = 2.0
POLL_SECONDS = 0.1
STOP_SECONDS = 10.0
MAX_EXITS = 10
WINDOW_SECONDS = 300.0
MAXMEMORY = "1gb"


def server_argv(program: Path, folder: Path, socket: Path) -> list[str]:
    """Command line of the embedded server: unix socket only, append-only, bounded, never evicting."""
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(folder),
        "daemonize": "no",
        "databases": "1",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory": MAXMEMORY,
        "maxmemory-policy": "noeviction",
    }
    return [str(program), *(part for key, value in options.items() for part in (f"--{key}", value))]


class Keeper:
    """The keeper's loop."""

    def __init__(self, home: Path, program: Path, socket: Path) -> None:
        self._folder = Home(home).redis
        self._argv = server_argv(program, self._folder, socket)
        self._socket = socket
        self._users = FileLock(self._folder / "users.lock")
        self._process: subprocess.Popen[bytes] | None = None
        self._exits: list[float] = []
        self._restart_at = 0.0
        self._ended = False

    def run(self) -> int:
        """Keep Redis until nobody uses it (0), or it ends again and again (1)."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        used = time.monotonic()
        try:
            while not self._ended:
                if not self._keep():
                    return 1
                now = time.monotonic()
                if not self._users.try_lock():
                    used = now
                elif now - used >= IDLE_SECONDS:
                    return 0  # with the lock: newcomers wait until Redis is down
                else:
                    self._users.unlock()
                time.sleep(POLL_SECONDS)
            return 0
        finally:
            self._stop()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._ended = True

    def _keep(self) -> bool:
        """(Re)start Redis if needed; False when it ended too often."""
        now = time.monotonic()
        if self._process is not None and self._process.poll() is not None:
            print(f"redis-server ended with status {self._process.returncode}", flush=True)
            self._process = None
            self._exits = [at for at in self._exits if now - at < WINDOW_SECONDS] + [now]
            self._restart_at = now + min(5.0, 0.1 * 2.0 ** (len(self._exits) - 1))
        if self._process is None and now >= self._restart_at:
            if len(self._exits) > MAX_EXITS:
                print("redis-server ends again and again; giving up", flush=True)
                return False
            self._socket.unlink(missing_ok=True)
            self._process = subprocess.Popen(wrap(self._argv), stdin=subprocess.DEVNULL)
        return True

    def _stop(self) -> None:
        if self._process is not None:
            self._process.terminate()  # Redis writes its append-only file out on SIGTERM
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(STOP_SECONDS)
        self._socket.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # something else lies there: not ours to remove
            self._socket.parent.rmdir()


def main() -> int:
    """Take the keeper's lock and keep Redis; 0 at once when another keeper is there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name in ("--home", "--server", "--socket"):
        parser.add_argument(name, type=Path, required=True)
    given = parser.parse_args()
    folder = Home(given.home).redis
    with FileLock(folder / "keeper.lock") as lock:
        if not lock.try_lock():
            return 0
        (folder / "keeper.pid").write_text(f"{os.getpid()}\n")
        return Keeper(given.home, given.server, given.socket).run()


if __name__ == "__main__":
    raise SystemExit(main())
