"""Processes of the benchmark: Headrace's own three, as ``headrace serve`` starts them, and the baselines."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from protos.headrace.v1 import refit_pb2, refit_pb2_grpc, rollout_pb2, rollout_pb2_grpc, types_pb2
from rollout_svc.engine.environment import worker_environment
from services.runtime import rpc, spawn
from services.runtime.errors import Internal, NotReady
from services.runtime.ports import ReservedPort

RUN = "bench-rollout"
START_SECONDS = 120.0
STOP_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Load:
    """What every subject does: ``prompts`` at most ``in_flight`` at a time."""

    policy_json: str
    prompts: list[str]
    in_flight: int
    kv_cache_mib: int


@dataclass(frozen=True, slots=True)
class Passed:
    """One pass."""

    seconds: float
    tokens: int


class Baseline:
    """One vLLM without Headrace."""

    def __init__(self, kind: str, job: Path, log: IO[bytes]) -> None:
        self._log = Path(log.name)
        self._process = subprocess.Popen(
            spawn.wrap([sys.executable, "-m", "benchmarks.rollout_parts.baseline", kind, str(job)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=worker_environment(threads=1),
        )
        self._kind = kind

    def ready(self) -> None:
        """Wait until it can generate; raises Internal when it ends before."""
        self._line()

    def one_pass(self, limit: int) -> Passed:
        """Generate at most ``limit`` tokens for every prompt."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"limit": limit}).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._line()
        return Passed(answer["seconds"], answer["tokens"])

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(b"{"):
                found: dict[str, Any] = json.loads(line)
                return found
        said = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise Internal(f"The baseline {self._kind} has ended: {said[-1] if said else ''}", where="benchmark")


class Headrace:
    """Bridge, router and one engine, each a process; the load comes from this one."""

    def __init__(self, folder: Path, load: Load) -> None:
        self._folder = folder
        self._load = load
        self._stack = ExitStack()
        self._loop = asyncio.new_event_loop()
        self._addresses: dict[str, str] = {}
        self._rollout: Any = None

    def __enter__(self) -> Self:
        for name in ("refit", "rollout", "engine"):
            with ReservedPort.free("127.0.0.1") as port:
                self._addresses[name] = port.address
        for name in ("refit", "rollout", "engine"):
            self._start(name)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run_until_complete(rpc.close_channels())
        self._loop.close()
        self._stack.close()

    def ready(self) -> list[list[int]]:
        """Set the engine up and commit the base model; the prompts as token ids."""
        return self._loop.run_until_complete(self._ready())

    def one_pass(self, limit: int) -> Passed:
        """Every prompt as a turn of at most ``limit`` tokens, through the router."""
        started = time.perf_counter()
        answers = self._loop.run_until_complete(self._turns(limit))
        tokens = sum(len(answer.sampled_ids) // 4 for answer in answers)
        return Passed(time.perf_counter() - started, tokens)

    async def _ready(self) -> list[list[int]]:
        self._rollout = rpc.stub(rollout_pb2_grpc.RolloutStub, self._addresses["rollout"], name="rollout")
        bridge = rpc.stub(refit_pb2_grpc.RefitStub, self._addresses["refit"], name="refit")
        fence = types_pb2.Fence(epoch=1)
        await bridge.Setup(refit_pb2.RefitSetupRequest(run=RUN, transport="shm", min_engines=1, fence=fence))
        setup = rollout_pb2.RolloutSetupRequest(run=RUN, policy_json=self._load.policy_json, seed=1)
        await self._rollout.Setup(setup)
        publish = refit_pb2.PublishRequest(run=RUN, fence=fence, version=types_pb2.PolicyVersion())
        await self._repeat(lambda: bridge.Publish(publish, timeout=5))
        answers = await self._turns(1)
        return [_ids(answer.rendered_ids) for answer in answers]

    async def _repeat(self, call: Any) -> None:
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                await call()
                return
            except NotReady:
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(0.1)

    async def _turns(self, limit: int) -> list[rollout_pb2.TurnResponse]:
        places = asyncio.Semaphore(self._load.in_flight)

        async def one(index: int, text: str) -> rollout_pb2.TurnResponse:
            async with places:
                answer: rollout_pb2.TurnResponse
                answer = await self._rollout.Turn(_request(index, text, limit))
                return answer

        return await asyncio.gather(*(one(i, text) for i, text in enumerate(self._load.prompts)))

    def _start(self, name: str) -> None:
        prefix = f"HEADRACE_{name.upper()}_"
        env = {
            **os.environ,
            "GRPC_VERBOSITY": "ERROR",
            "HEADRACE_HOME": str(self._folder / "home"),
            f"{prefix}LISTEN": self._addresses[name],
            **{f"{prefix}{key}": value for key, value in self._settings(name).items()},
        }
        with (self._folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                spawn.wrap([sys.executable, "-m", "services.cli.main", "serve", name]),
                env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        self._stack.callback(_stop, process)

    def _settings(self, name: str) -> dict[str, str]:
        if name == "refit":
            return {"ROLLOUT": self._addresses["rollout"]}
        if name == "rollout":
            return {"REFIT": self._addresses["refit"]}
        return {
            "REFIT": self._addresses["refit"],
            "MAX_NUM_SEQS": str(self._load.in_flight),
            "KV_CACHE_MIB": str(self._load.kv_cache_mib),
        }


def _request(index: int, text: str, limit: int) -> rollout_pb2.TurnRequest:
    return rollout_pb2.TurnRequest(
        key=types_pb2.SampleKey(run=RUN, book="train", group=index, sample=0),
        run_seed=1,
        messages=[types_pb2.Message(role="user", content=text)],
        sampling=types_pb2.SamplingParams(
            temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, max_new_tokens=limit
        ),
    )


def _ids(data: bytes) -> list[int]:
    import numpy as np

    ids: list[int] = np.frombuffer(data, "<i4").tolist()
    return ids


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
