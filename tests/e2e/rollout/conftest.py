"""One real engine and one real router for all tests here; only the bridge's roster is stood in for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import pytest_asyncio

from protos.headrace.v1 import refit_pb2, refit_pb2_grpc, rollout_pb2, rollout_pb2_grpc, types_pb2
from rollout_svc.router.app import Router
from rollout_svc.settings import RouterSettings
from services.runtime import rpc, spawn
from services.runtime.service import ServiceApp, start_server
from services.runtime.settings import ServiceSettings
from tests.e2e.rollout.tiny import make_model

RUN = "e2e"


class Roster(ServiceApp, refit_pb2_grpc.RefitServicer):
    """The bridge's roster without weights: an engine serves as soon as it says that it holds a version."""

    name = "refit"

    def __init__(self):
        self.infos = {}
        self.changed = asyncio.Condition()
        self.ended = False

    def register(self, server):
        refit_pb2_grpc.add_RefitServicer_to_server(self, server)
        return ("headrace.v1.Refit",)

    async def draining(self):
        self.ended = True
        async with self.changed:
            self.changed.notify_all()

    async def RegisterEngine(self, request, context):
        async with self.changed:
            self.infos[request.info.engine] = request.info
            self.changed.notify_all()
        return refit_pb2.RegisterEngineResponse(heartbeat_s=0.2)

    async def DeregisterEngine(self, request, context):
        async with self.changed:
            self.infos.pop(request.engine, None)
            self.changed.notify_all()
        return refit_pb2.DeregisterEngineResponse()

    async def WatchRoster(self, request, context):
        while not self.ended:
            yield self.roster()
            async with self.changed:
                await self.changed.wait()

    def roster(self):
        entries = [refit_pb2.RosterEntry(info=info, state=self.state(info)) for info in self.infos.values()]
        return refit_pb2.Roster(engines=entries)

    def state(self, info):
        if info.name == "render":
            return refit_pb2.ENGINE_STATE_RENDER_ONLY
        if info.ready and info.HasField("version"):
            return refit_pb2.ENGINE_STATE_SERVING
        return refit_pb2.ENGINE_STATE_JOINING

    async def find(self, condition, timeout=90.0):
        """The first registered info that meets ``condition``."""
        async with asyncio.timeout(timeout):
            while True:
                for info in self.infos.values():
                    if condition(info):
                        return info
                async with self.changed:
                    await self.changed.wait()


class Host:
    """An engine host as a process."""

    def __init__(self, folder: Path, refit: str, **settings: str):
        self.ready = folder / "engine-ready.json"
        self.log = folder / "engine.log"
        env = {
            **os.environ,
            "HEADRACE_HOME": str(folder),
            "HEADRACE_ENGINE_LISTEN": "127.0.0.1:0",
            "HEADRACE_ENGINE_REFIT": refit,
            "HEADRACE_ENGINE_READY_FILE": str(self.ready),
            **{f"HEADRACE_ENGINE_{key.upper()}": value for key, value in settings.items()},
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                spawn.wrap([sys.executable, "-m", "rollout_svc.engine.service"]),
                env=env, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    async def address(self) -> str:
        async with asyncio.timeout(20):
            while not self.ready.exists():
                assert self.process.poll() is None, self.log.read_text()
                await asyncio.sleep(0.02)
        return json.loads(self.ready.read_text())["address"]

    def tree(self) -> list[int]:
        """The host and all its descendants."""
        import psutil

        return [
            self.process.pid,
            *(child.pid for child in psutil.Process(self.process.pid).children(recursive=True)),
        ]

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)


class Stack:
    """What the tests talk to."""

    def __init__(self, roster, host, router, model: Path, roster_address: str):
        self.roster = roster
        self.roster_address = roster_address
        self.host = host
        self.router = router
        self.model = model

    async def engine(self):
        """A stub of the worker that is set up, and its info."""
        info = await self.roster.find(lambda info: info.ready and info.run == RUN)
        return rpc.stub(rollout_pb2_grpc.EngineStub, info.address, name="engine"), info

    async def commit(self, number=0):
        _, info = await self.engine()
        return await self.commit_on(info, number)

    async def commit_on(self, info, number=0):
        engine = rpc.stub(rollout_pb2_grpc.EngineStub, info.address, name="engine")
        version = types_pb2.PolicyVersion(number=number)
        await engine.CommitVersion(
            rollout_pb2.CommitVersionRequest(run=RUN, generation=1000 * number, version=version)
        )
        await self.roster.find(lambda found: found.engine == info.engine and found.HasField("version"))
        return engine


def policy(model: Path, **generation):
    return json.dumps(
        {
            "model_name": str(model),
            "precision": "float32",
            "max_total_sequence_length": 256,
            "generation": {"vllm_cfg": {"enforce_eager": False, "gpu_memory_utilization": 0.6}, **generation},
        }
    )


def turn(messages, *, group=0, sample=0, number=0, prefix=b"", book="train", seed=7, **sampling):
    values = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_new_tokens": 32, **sampling}
    chat = [types_pb2.Message(role="user", content=m) if isinstance(m, str) else m for m in messages]
    return rollout_pb2.TurnRequest(
        key=types_pb2.SampleKey(run=RUN, book=book, group=group, sample=sample),
        turn=number, run_seed=seed, prefix_ids=prefix, messages=chat,
        sampling=types_pb2.SamplingParams(**values),
    )  # fmt: skip


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def reference(model_dir):
    """The same model in torch: log-probabilities of a sequence at a temperature."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    def logprobs(ids, temperature=1.0):
        with torch.no_grad():
            scores = (model(torch.tensor([ids])).logits[0].float() / temperature).log_softmax(-1)
        return [0.0, *(scores[i - 1, ids[i]].item() for i in range(1, len(ids)))]

    logprobs.model = model
    return logprobs


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stack(model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stack")
    roster = Roster()
    refit = await start_server(roster, ServiceSettings(home=folder))
    router = await start_server(
        Router(settings := RouterSettings(listen="127.0.0.1:0", refit=refit.address, home=folder)), settings
    )
    host = Host(folder, refit.address)
    try:
        await roster.find(lambda info: True, timeout=20)
        stub = rpc.stub(rollout_pb2_grpc.RolloutStub, router.address, name="rollout")
        await stub.Setup(rollout_pb2.RolloutSetupRequest(run=RUN, policy_json=policy(model_dir), seed=1))
        found = Stack(roster, host, stub, model_dir, refit.address)
        await found.commit()
        yield found
        if found.host is not host:
            found.host.kill()
    finally:
        host.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(host.process.wait, 20)
        host.kill()
        await router.stop(1)
        await refit.stop(1)
        await rpc.close_channels()
