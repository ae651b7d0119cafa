"""The buffer as a process: quick to be ready, killed in the middle, nothing lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from protos.headrace.v1 import buffer_pb2 as pb
from protos.headrace.v1.buffer_pb2_grpc import BufferStub
from services.buffer.audit import audit_store
from services.runtime.redis import connect
from services.runtime.rpc import close_channels, stub
from tests.contract.buffer.test_service import claim, lease, opened
from tests.unit.buffer.world import RUN, setup, spec, trajectory

MAIN = "import sys; from services.buffer.service import main; sys.exit(main())"


def start(redis_url: str, home: Path, listen: str = "127.0.0.1:0") -> tuple[subprocess.Popen[bytes], str]:
    ready = home / "ready.json"
    ready.unlink(missing_ok=True)
    settings = {"LISTEN": listen, "REDIS_URL": redis_url, "HOME": str(home), "READY_FILE": str(ready)}
    env = {**os.environ, **{f"HEADRACE_BUFFER_{key}": value for key, value in settings.items()}}
    process = subprocess.Popen([sys.executable, "-c", MAIN], env=env, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 15
    while not ready.exists():
        assert process.poll() is None
        assert time.monotonic() < end, "not ready in time"
        time.sleep(0.02)
    return process, json.loads(ready.read_text())["address"]


async def test_a_killed_buffer_loses_nothing(redis_url: str, tmp_path: Path) -> None:
    process, address = start(redis_url, tmp_path)
    try:
        buffer = stub(BufferStub, address, name="buffer")
        await buffer.Setup(setup())
        await buffer.OpenGroups(opened(spec(0), spec(1)))
        work = (await buffer.Claim(claim())).work
        await buffer.Append(pb.AppendRequest(trajectories=[trajectory(w) for w in work[:3]]))
        process.kill()
        process.wait(10)
        process, _ = start(redis_url, tmp_path, address)
        # No Setup again: the run is in Redis, and the idempotent call finds the new process by itself.
        await buffer.Append(pb.AppendRequest(trajectories=[trajectory(w) for w in work]))
        leased = await buffer.Lease(lease(groups=2))
        assert [g.group for g in leased.manifest.groups] == [0, 1]
        client = connect(redis_url)
        assert (await audit_store(client, RUN)).balanced
        await client.aclose()
        process.terminate()
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait(10)
        await close_channels()


def test_a_wrong_setting_ends_with_one_line_and_status_2() -> None:
    env = {**os.environ, "HEADRACE_BUFFER_REDIS_ULR": "x"}
    done = subprocess.run(
        [sys.executable, "-c", MAIN], env=env, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 2
    assert "HEADRACE_BUFFER_REDIS_URL" in done.stderr
    assert done.stderr.count("\n") == 1
