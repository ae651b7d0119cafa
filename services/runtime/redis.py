"""Redis for the services that use it: the embedded one of a home, or one that is given by URL.

Invariants
- ``acquire`` makes its caller a *user*: the embedded Redis runs until the last user has gone (see
  :mod:`services.runtime.redis_keeper`); nothing is left behind, whatever dies.
- Every wait is bounded; clients never resend a command by themselves, since it may have taken effect.
- An external Redis must not evict: dropped keys would be lost trajectories.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

import redis as redis_py
import redis.asyncio as redis_async
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from services.runtime.errors import InvalidInput, NotReady
from services.runtime.home import Home
from services.runtime.locks import FileLock
from services.runtime.redis_errors import translated
from services.runtime.redis_scripts import ScriptSet
from services.runtime.redis_server import check_version, find_server
from services.runtime.socket_dir import socket_path
from services.runtime.sweep import TOKEN_KEY

__all__ = ["EmbeddedRedis", "RedisHandle", "ScriptSet", "acquire", "connect", "connect_sync", "ping"]

CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 15.0
START_SECONDS = 60.0
"""Loading a large append-only file takes its time."""
LOCK_SECONDS = 20.0
_ROOT = Path(__file__).resolve().parents[2]


class RedisHandle:
    """A Redis in use; ``close`` when done (the end of the process does it too)."""

    def __init__(self, url: str, embedded: EmbeddedRedis | None = None) -> None:
        self.url = url
        self._embedded = embedded

    def ensure(self) -> None:
        """Start the embedded Redis again should its keeper have been killed; raises NotReady."""
        if self._embedded is not None:
            self._embedded.ensure()

    async def guard(self, every: float = 1.0) -> None:
        """Call :meth:`ensure` again and again, off the event loop; run it as a task."""
        while True:
            await asyncio.to_thread(self.ensure)
            await asyncio.sleep(every)

    def close(self) -> None:
        """Stop using it; idempotent."""
        if self._embedded is not None:
            self._embedded.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EmbeddedRedis:
    """One user's hold on the embedded Redis of ``home``."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._folder = Home(home).redis
        self._program = find_server()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise InvalidInput(
                f"Cannot write: {exc.strerror}", where=str(home), do="Set HEADRACE_HOME."
            ) from exc
        self._user = FileLock(self._folder / "users.lock").lock(LOCK_SECONDS, shared=True)
        self.socket = socket_path(home)

    @property
    def url(self) -> str:
        """URL for :func:`connect`."""
        return f"unix://{self.socket}"

    def ensure(self) -> None:
        """Start the keeper unless it is there, and wait until Redis answers; raises NotReady."""
        if ping(self.url, 0.5):
            return
        end = time.monotonic() + START_SECONDS
        log = self._folder / "keeper.log"
        with FileLock(self._folder / "start.lock").lock(START_SECONDS):
            while not ping(self.url, 0.5):
                if time.monotonic() > end:
                    raise NotReady("The embedded Redis does not answer", where=str(log))
                if self._keeper_absent():
                    self._start_keeper()
                time.sleep(0.02)

    def close(self) -> None:
        """Stop being a user; idempotent."""
        self._user.close()

    def _keeper_absent(self) -> bool:
        with FileLock(self._folder / "keeper.lock") as lock:
            return lock.try_lock()

    def _start_keeper(self) -> None:
        self.socket = socket_path(self._home)  # a keeper that ended has removed the folder
        argv = [sys.executable, "-m", "services.runtime.redis_keeper", "--home", str(self._home)]
        argv += ["--server", str(self._program), "--socket", str(self.socket)]
        path = os.pathsep.join(part for part in (str(_ROOT), os.environ.get("PYTHONPATH", "")) if part)
        with (self._folder / "keeper.log").open("ab") as log:
            keeper = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**_unsupervised(), "PYTHONPATH": path},
                cwd=self._folder,
                start_new_session=True,
            )
        _wait_for_start(keeper, self._folder)


def acquire(home: Path, url: str | None = None) -> RedisHandle:
    """Use the Redis at ``url``, else the embedded one of ``home``, which is started on demand.

    Raises InvalidInput when there is no usable Redis, NotReady when it does not answer in time.
    """
    if url is not None:
        _check_external(url)
        return RedisHandle(url)
    embedded = EmbeddedRedis(home)
    try:
        embedded.ensure()
    except BaseException:
        embedded.close()
        raise
    return RedisHandle(embedded.url, embedded)


class _CancellableRedis(redis_async.Redis):
    """redis-py sends through ``asyncio.wait_for``, which on Python 3.11 loses a cancel that arrives as the
    send ends; the task that was told to end would go on for ever. Such a cancel is raised again here."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        task = asyncio.current_task()
        before = task.cancelling() if task is not None else 0
        answer = await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError
        return answer


def connect(url: str, **options: Any) -> redis_async.Redis:
    """An asyncio client (bytes in, bytes out). A blocking command must block for less than 15 s."""
    return _CancellableRedis.from_url(url, **{**_options(), "retry": AsyncRetry(NoBackoff(), 0), **options})


def connect_sync(url: str, **options: Any) -> redis_py.Redis:
    """A blocking client with the same bounds."""
    return redis_py.Redis.from_url(url, **{**_options(), **options})


def ping(url: str, timeout: float) -> bool:
    """Whether a Redis answers at ``url`` within ``timeout`` seconds and has loaded its data."""
    client = connect_sync(url, socket_timeout=timeout, socket_connect_timeout=timeout)
    try:
        return bool(client.ping())
    except redis_py.RedisError:
        return False
    finally:
        client.close()


def _options() -> dict[str, Any]:
    return {
        "socket_connect_timeout": CONNECT_SECONDS,
        "socket_timeout": ANSWER_SECONDS,
        "retry": Retry(NoBackoff(), 0),
    }


def _check_external(url: str) -> None:
    try:
        client = connect_sync(url)
    except ValueError as exc:
        raise InvalidInput(f"{url} is no Redis URL: {exc}", do="Use redis://HOST:PORT/0.") from exc
    with translated(url):
        info: dict[str, Any] = client.info()
    client.close()
    check_version(tuple(int(part) for part in str(info["redis_version"]).split(".")[:3]), where=url)
    policy = info.get("maxmemory_policy", "noeviction")
    if info.get("maxmemory", 0) and policy != "noeviction":
        raise InvalidInput(
            f"This Redis evicts keys ({policy})", where=url, do="Set maxmemory-policy to noeviction."
        )


def _unsupervised() -> dict[str, str]:
    # The keeper serves other stacks too: it must not be swept with the one that started it.
    return {key: value for key, value in os.environ.items() if key != TOKEN_KEY}


def _wait_for_start(keeper: subprocess.Popen[bytes], folder: Path) -> None:
    # The keeper needs a moment to take its lock; starting a second one meanwhile would be wasted work.
    end = time.monotonic() + 10.0
    while time.monotonic() < end:
        if keeper.poll() is not None:
            raise NotReady("The keeper of the embedded Redis ended", where=str(folder / "keeper.log"))
        with FileLock(folder / "keeper.lock") as lock:
            if not lock.try_lock():
                return
        time.sleep(0.02)
    raise NotReady("The keeper of the embedded Redis does not start", where=str(folder / "keeper.log"))
