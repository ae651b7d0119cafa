"""Fake trainer, router and engines behind real gRPC, with faults on demand and one common log of calls."""

from __future__ import annotations

import asyncio

import numpy as np

from protos.headrace.v1 import rollout_pb2, rollout_pb2_grpc, trainer_pb2, trainer_pb2_grpc, types_pb2
from refit_bridge.plan import TensorSpec, plan_hash
from services.runtime.errors import Corrupt, Fenced, Refused, Unsupported
from services.runtime.service import ServiceApp

SPECS = [TensorSpec("a.weight", "float32", (2, 3)), TensorSpec("b.weight", "bfloat16", (4,))]
SEQUENCES = [np.arange(5, dtype=np.int32).tobytes(), np.arange(7, dtype=np.int32).tobytes()]


def scores(version: int, sequences, shift: float = 0.0) -> list[bytes]:
    """Log-probabilities that tell one version from another."""
    rows = [-np.arange(len(ids) // 4, dtype=np.float32) / 10 - version - shift for ids in sequences]
    return [np.where(np.arange(len(row)) == 0, 0, row).astype(np.float32).tobytes() for row in rows]


class FakeTrainer(ServiceApp, trainer_pb2_grpc.TrainerServicer):
    name = "trainer"

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.specs = list(SPECS)
        self.number = 0
        self.staged: dict[tuple[int, int], trainer_pb2.StageWeightsResponse] = {}
        self.stagings = 0

    def register(self, server):
        trainer_pb2_grpc.add_TrainerServicer_to_server(self, server)
        return ["headrace.v1.Trainer"]

    async def StageWeights(self, request, context):
        key = (request.version.incarnation, request.version.number)
        if key not in self.staged:
            if request.version.number != self.number:
                raise Refused(f"the trainer is at {self.number}")
            self.stagings += 1
            self.log.append(f"trainer stage {key[1]}")
            self.staged[key] = self._describe(request)
        return self.staged[key]

    async def ReleaseWeights(self, request, context):
        self.log.append(f"trainer release {request.version.number}")
        self.staged.pop((request.version.incarnation, request.version.number), None)
        return trainer_pb2.ReleaseWeightsResponse()

    async def Score(self, request, context):
        return rollout_pb2.ScoreTokensResponse(logprobs=scores(self.number, request.sequences))

    def _describe(self, request):
        slices = [
            rollout_pb2.TensorSlice(name=spec.name, offset=64 * i, nbytes=spec.nbytes, checksum=2**63 + i)
            for i, spec in enumerate(self.specs)
        ]
        return trainer_pb2.StageWeightsResponse(
            version=types_pb2.PolicyVersion(
                incarnation=request.version.incarnation, number=request.version.number,
                digest=f"digest{self.stagings}",
            ),
            plan=[spec.to_proto() for spec in self.specs],
            plan_hash=plan_hash(self.specs),
            shm_name="headrace-r-0-1-0123456789abcdef",
            chunks=[trainer_pb2.WeightChunk(slices=[piece]) for piece in slices],
            nbytes=sum(spec.nbytes for spec in self.specs),
        )  # fmt: skip


class FakeRouter(ServiceApp, rollout_pb2_grpc.RolloutServicer):
    name = "rollout"

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.closed: set[str] = set()
        self.in_flight = 0

    def register(self, server):
        rollout_pb2_grpc.add_RolloutServicer_to_server(self, server)
        return ["headrace.v1.Rollout"]

    async def Pause(self, request, context):
        for engine in request.engines:
            self.log.append(f"{engine} gate closed")
            self.closed.add(engine)
        return rollout_pb2.GateResponse(in_flight=self.in_flight)

    async def Resume(self, request, context):
        for engine in request.engines:
            self.log.append(f"{engine} gate open")
            self.closed.discard(engine)
        return rollout_pb2.GateResponse()


class FakeEngine(ServiceApp, rollout_pb2_grpc.EngineServicer):
    """Keeps the order that the real engine insists on, and fails where ``fault`` says."""

    name = "engine"

    def __init__(self, log: list[str], engine: str) -> None:
        self.log = log
        self.engine = engine
        self.address = ""
        self.run = "r"
        self.generation = 0
        self.generations: list[int] = []
        self.paused = self.updating = self.broken = False
        self.weights = 0
        self.loaded = 0
        self.plans: set[str] = set()
        self.version: types_pb2.PolicyVersion | None = None
        self.fault = ""
        self.hang = asyncio.Event()

    def register(self, server):
        rollout_pb2_grpc.add_EngineServicer_to_server(self, server)
        return ["headrace.v1.Engine"]

    def info(self) -> rollout_pb2.EngineInfo:
        return rollout_pb2.EngineInfo(
            engine=self.engine, name="vllm", address=self.address, run=self.run, ready=True,
            version=self.version, transports=["shm"],
        )  # fmt: skip

    async def Pause(self, request, context):
        mode = rollout_pb2.PauseMode.Name(request.mode).removeprefix("PAUSE_MODE_").lower()
        caches = " and clear" if request.clear_cache and mode != "wait" else ""
        self._say("pause" if mode == "wait" else f"pause {mode}{caches}")
        if self.fault == "pause" and mode != "abort":
            raise Unsupported("no pause here")
        self.paused = True
        return rollout_pb2.PauseEngineResponse()

    async def Resume(self, request, context):
        if self.updating or self.broken:
            raise Refused("half an update")
        self._say("resume")
        self.paused = False
        return rollout_pb2.ResumeEngineResponse()

    async def BeginUpdate(self, request, context):
        if request.generation < self.generation:
            raise Fenced("old generation")
        if not self.paused:
            raise Refused("not paused")
        if request.plan:
            self.plans.add(request.plan_hash)
        if request.plan_hash not in self.plans:
            return rollout_pb2.BeginUpdateResponse(plan_known=False)
        self._say(f"begin {request.version.number}")
        self.generation, self.loaded = request.generation, 0
        self.generations.append(request.generation)
        self.updating = self.broken = True
        self.version, self.pending = None, request.version.number
        return rollout_pb2.BeginUpdateResponse(plan_known=True)

    async def LoadWeights(self, request, context):
        assert request.generation == self.generation
        if self.fault == "hang":
            await self.hang.wait()
        if self.fault == "load":
            self.updating = False
            raise Corrupt(f"Tensor {request.slices[0].name} arrived damaged")
        self.loaded += len(request.slices)
        self._say("load")
        return rollout_pb2.LoadWeightsResponse(loaded=len(request.slices))

    async def FinishUpdate(self, request, context):
        self._say("finish")
        self.updating = False
        response = rollout_pb2.FinishUpdateResponse(checked=self.loaded)
        if self.fault == "image":
            response.failures.add(name="b.weight", ok=False, detail="stale")
            return response
        self.broken, self.weights = False, self.pending
        return response

    async def Score(self, request, context):
        assert request.probe
        assert not self.paused, "a paused engine would queue the probe for ever"
        self._say("probe")
        shift = 0.5 if self.fault == "probe" else 0.0
        return rollout_pb2.ScoreTokensResponse(logprobs=scores(self.weights, request.sequences, shift))

    async def CommitVersion(self, request, context):
        self._say(f"commit {request.version.number}")
        self.version = types_pb2.PolicyVersion()
        self.version.CopyFrom(request.version)
        return rollout_pb2.CommitVersionResponse()

    def _say(self, what: str) -> None:
        self.log.append(f"{self.engine} {what}")
