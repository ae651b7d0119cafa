"""Turn and Score of one engine."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from protos.headrace.v1 import rollout_pb2, types_pb2
from rollout_svc.engine.rendering import Rendering
from rollout_svc.engine.versions import Versions
from rollout_svc.turns.ids import ids_bytes, ids_from, logprobs_bytes
from rollout_svc.turns.sampling import check_sampling
from rollout_svc.turns.seeds import turn_seed
from services.runtime import tracing
from services.runtime.errors import Internal, InvalidInput, NotReady

if TYPE_CHECKING:
    from rollout_svc.engine.core import EngineCore, Sampled

_FINISH = {"stop": types_pb2.FINISH_REASON_STOP, "length": types_pb2.FINISH_REASON_LENGTH}


class Turns:
    """Answers turns under the committed version."""

    def __init__(self, engine: str, core: EngineCore, rendering: Rendering, versions: Versions) -> None:
        self._engine = engine
        self._core = core
        self._rendering = rendering
        self._versions = versions

    async def turn(self, request: rollout_pb2.TurnRequest) -> rollout_pb2.TurnResponse:
        """Render what is new, sample, parse."""
        if request.key.run != self._versions.run:
            raise NotReady(
                f"The engine serves run {self._versions.run}, not {request.key.run}", reason="OTHER_RUN"
            )
        sampling = check_sampling(request.sampling, book=request.key.book)
        version = self._versions.serving()
        prefix = ids_from(request.prefix_ids, where="prefix_ids")
        with tracing.span("engine.turn", turn=request.turn, engine=self._engine) as span:
            rendered = await self._rendering.rendered(request, prefix)
            seed = turn_seed(request.run_seed, request.key.group, request.key.sample, request.turn)
            started = time.monotonic()
            sampled = await self._core.sample(
                prefix + rendered, sampling, seed=seed, salt=self._versions.salt(version)
            )
            seconds = time.monotonic() - started
            self._check_version(version)
            span.set_attribute("sampled_tokens", len(sampled.ids))
            return await self._response(request, rendered, sampled, version, seconds)

    async def _response(
        self,
        request: rollout_pb2.TurnRequest,
        rendered: list[int],
        sampled: Sampled,
        version: types_pb2.PolicyVersion,
        seconds: float,
    ) -> rollout_pb2.TurnResponse:
        finish = _FINISH[sampled.finish]
        message = await self._rendering.message(request, sampled.ids, finish, sampled.stop_string)
        return rollout_pb2.TurnResponse(
            rendered_ids=ids_bytes(rendered),
            sampled_ids=ids_bytes(sampled.ids),
            logprobs=logprobs_bytes(sampled.logprobs),
            versions=ids_bytes([version.number] * len(sampled.ids)),
            message=message,
            finish_reason=finish,
            policy_versions=[version],
            engine=self._engine,
            generation_s=seconds,
            cached_tokens=sampled.cached_tokens,
        )

    async def score(self, request: rollout_pb2.ScoreTokensRequest) -> rollout_pb2.ScoreTokensResponse:
        """log_softmax(logits / temperature) of every token of every sequence."""
        if not request.temperature > 0:
            raise InvalidInput(
                f"temperature is {request.temperature}", where="temperature", do="Use a value > 0."
            )
        if request.run and request.run != self._versions.run:
            raise NotReady(f"The engine serves run {self._versions.run}", reason="OTHER_RUN")
        version = self._versions.scoring(probe=request.probe)
        temperature = float(f"{request.temperature:.7g}")
        # A salt of its own: what a probe caches before the commit is never read by a turn.
        salt = f"{self._versions.run}:score:{self._versions.generation}"
        sequences = [
            ids_from(data, where=f"sequences[{index}]") for index, data in enumerate(request.sequences)
        ]
        scores = await asyncio.gather(
            *(self._core.score(sequence, temperature, salt=salt) for sequence in sequences)
        )
        return rollout_pb2.ScoreTokensResponse(
            logprobs=[score.tobytes() for score in scores], version=version
        )

    def _check_version(self, version: types_pb2.PolicyVersion) -> None:
        # The drain protocol excludes it; if it happens, the tokens belong to no single version.
        if self._versions.committed is not version:
            raise Internal("The version changed during a turn", do="Pause the router before an update.")
