"""Chunks, home, ports, errors, retry budget: small parts whose change would hurt a user."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.runtime.chunks import CHUNK_BYTES, join, join_stream, split
from services.runtime.errors import _TREE, Corrupt, HeadraceError, InvalidInput, NotFound, to_status
from services.runtime.home import Home, default_home, resolve_run, write_atomic
from services.runtime.locks import FileLock
from services.runtime.ports import ReservedPort
from services.runtime.retry import CAP_SECONDS, RetryBudget, backoff


@given(st.binary(max_size=4000), st.integers(1, 700))
def test_chunks_round_trip(data: bytes, size: int) -> None:
    chunks = list(split(data, size))
    assert all(0 < len(chunk) <= size for chunk in chunks)
    assert join(chunks, len(data)) == data


def test_chunks_are_half_a_megabyte() -> None:
    assert [len(chunk) for chunk in split(bytes(2 * CHUNK_BYTES + 1))] == [524288, 524288, 1]


async def test_joining_checks_the_length() -> None:
    async def stream() -> AsyncIterator[bytes]:
        yield b"abc"

    assert await join_stream(stream(), 3) == b"abc"
    with pytest.raises(Corrupt, match="after 3 of 4"):
        await join_stream(stream(), 4)
    with pytest.raises(Corrupt, match="longer than its 2"):
        join([b"abc"], 2)


def test_last_run_is_the_one_submitted_last(tmp_path: Path) -> None:
    home = Home(tmp_path)
    with pytest.raises(NotFound, match="no run yet"):
        resolve_run(home, "last")
    for age, name in enumerate(["run-b", "run-a"]):
        recipe = home.run(name).create().recipe
        write_atomic(recipe, "kind: grpo\n")
        os.utime(recipe, ns=(age, age))
    home.run("no-recipe").create()
    assert resolve_run(tmp_path, "last").run_id == "run-a"
    assert resolve_run(home, "run-b").ledger == tmp_path / "runs/run-b/ledger.jsonl"
    with pytest.raises(NotFound, match="no-recipe"):
        resolve_run(home, "no-recipe")


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "x" * 200])
def test_run_id_cannot_leave_the_home(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="run id"):
        Home(tmp_path).run(name)


def test_home_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    assert default_home() == tmp_path
    monkeypatch.delenv("HEADRACE_HOME")
    assert default_home() == Path.home() / ".local/state/headrace"


def test_atomic_write_leaves_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "file"
    write_atomic(target, "one")
    write_atomic(target, b"two")
    assert target.read_bytes() == b"two"
    assert [path.name for path in target.parent.iterdir()] == ["file"]


def test_reserved_port_is_kept_from_strangers_and_shared_with_the_service() -> None:
    with ReservedPort.free() as port:
        with pytest.raises(InvalidInput, match=f"Port {port.port} is in use"):
            ReservedPort.explicit(port.host, port.port)
        for _ in range(2):  # the service, and the service after its restart
            with socket.socket() as service:
                service.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                service.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                service.bind((port.host, port.port))
                service.listen()
                with socket.create_connection((port.host, port.port), timeout=2):
                    service.accept()[0].close()
        with socket.socket() as stranger:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                stranger.bind((port.host, port.port))


def test_explicit_port_beside_a_listener_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as server:
        number = server.getsockname()[1]
        with pytest.raises(InvalidInput, match=str(number)):
            ReservedPort.explicit("127.0.0.1", number)
    with ReservedPort.explicit("127.0.0.1", number) as port:
        assert port.address == f"127.0.0.1:{number}"


def test_every_error_has_a_status() -> None:
    for cls in _TREE.values():
        status = to_status(cls("what", where="there", do="Do it."))
        assert status.code is cls.code
        assert status.details == "what (there). Do it."
    assert str(HeadraceError("Alone.")) == "Alone."


def test_retry_budget_delays_but_never_forgets() -> None:
    now = [0.0]
    budget = RetryBudget(rate=10, burst=2, clock=lambda: now[0])
    assert [budget.reserve() for _ in range(4)] == pytest.approx([0, 0, 0.1, 0.2])
    now[0] = 10.0
    assert budget.reserve() == 0
    assert max(backoff(40) for _ in range(200)) <= CAP_SECONDS


def test_file_lock_excludes(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with (
        FileLock(path).lock(1, shared=True) as first,
        FileLock(path).lock(1, shared=True),
        FileLock(path) as w,
    ):
        assert not w.try_lock()
        first.close()
        assert not w.try_lock()
    with FileLock(path) as w:
        assert w.try_lock()
