"""Turn and Score of one engine.

Invariants
- A turn is answered with the committed version that sampled each of its tokens. Tokens of weights that are
  not committed (yet) are withheld until the commit, and given up when it does not come.
- A turn goes on from its exact ids when an in-flight update had to break it off.
- Only so many turns are at vLLM as have a place in its batch; the others have not begun, and have no version.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from protos.headrace.v1 import rollout_pb2, types_pb2
from rollout_svc.engine.core_types import LabelSpan, Sampled
from rollout_svc.engine.pieces import Pieces, in_order, version_bytes
from rollout_svc.engine.rendering import Rendering
from rollout_svc.engine.versions import Versions
from rollout_svc.turns.ids import ids_bytes, ids_from, logprobs_bytes
from rollout_svc.turns.sampling import Sampling, check_sampling
from rollout_svc.turns.seeds import continuation_seed, turn_seed
from services.runtime import metrics, tracing
from services.runtime.errors import Internal, InvalidInput, NotReady

if TYPE_CHECKING:
    from rollout_svc.engine.core import EngineCore

_FINISH = {"stop": types_pb2.FINISH_REASON_STOP, "length": types_pb2.FINISH_REASON_LENGTH}


class Turns:
    """Answers turns under committed versions."""

    def __init__(self, engine: str, core: EngineCore, rendering: Rendering, versions: Versions) -> None:
        self._engine = engine
        self._core = core
        self._rendering = rendering
        self._versions = versions
        self._places = asyncio.Semaphore(core.turns_at_once)

    async def turn(self, request: rollout_pb2.TurnRequest) -> rollout_pb2.TurnResponse:
        """Render what is new, sample, parse."""
        if request.key.run != self._versions.run:
            raise NotReady(
                f"The engine serves run {self._versions.run}, not {request.key.run}", reason="OTHER_RUN"
            )
        sampling = check_sampling(request.sampling, book=request.key.book)
        if not self._versions.carrying:
            self._versions.serving()
        prefix = ids_from(request.prefix_ids, where="prefix_ids")
        with tracing.span("engine.turn", turn=request.turn, engine=self._engine) as span:
            rendered = await self._rendering.rendered(request, prefix)
            seed = turn_seed(request.run_seed, request.key.group, request.key.sample, request.turn)
            started = time.monotonic()
            carries = self._versions.carries
            async with self._places:
                pieces = await self._sample(prefix + rendered, sampling, seed)
            seconds = time.monotonic() - started
            versions = await self._versions.committed_as(label for label, _ in pieces.labels)
            self._check_whole(pieces, carries)
            span.set_attribute("sampled_tokens", len(pieces.ids))
            return await self._response(request, rendered, pieces, versions, seconds)

    async def _sample(self, prompt: list[int], sampling: Sampling, seed: int) -> Pieces:
        """Sample until the turn ends, however often in-flight updates break it off."""
        pieces = Pieces()
        while True:
            version = await self._versions.admitted()
            before = (self._versions.label, self._versions.carries)
            piece = await self._core.sample(
                prompt + pieces.ids,
                replace(sampling, max_new_tokens=sampling.max_new_tokens - len(pieces.ids)),
                seed=continuation_seed(seed, pieces.number),
                salt=self._versions.salt(version),
            )
            pieces.add(piece, self._labels(piece, *before))
            if piece.finish in _FINISH:
                return pieces
            self._may_continue(sampling, before[1])

    def _labels(self, piece: Sampled, label: str, carries: int) -> Sequence[LabelSpan]:
        """Which weights sampled ``piece``, which was begun under ``label`` after ``carries`` updates."""
        if piece.labels is not None:
            return piece.labels
        if piece.finish in _FINISH and (label, carries) != (self._versions.label, self._versions.carries):
            # It may have been on its way to vLLM at the pause, and have run after the update.
            raise NotReady("The weights changed beside the turn", do="Repeat it.", reason="UNCERTAIN_VERSION")
        return [LabelSpan(label, len(piece.ids))]

    def _may_continue(self, sampling: Sampling, carries: int) -> None:
        """Raise NotReady unless an in-flight update broke the turn off, and nothing is lost at the seam."""
        broken_off = not self._core.labels_tokens and self._versions.carries != carries
        if not broken_off or sampling.stop or sampling.bad_words:
            # A string that lies across the seam would not be seen: such a turn is done again as a whole.
            raise NotReady("The engine gave the turn up", do="Repeat it.", reason="ABORTED")

    async def _response(
        self,
        request: rollout_pb2.TurnRequest,
        rendered: list[int],
        pieces: Pieces,
        versions: Sequence[types_pb2.PolicyVersion],
        seconds: float,
    ) -> rollout_pb2.TurnResponse:
        metrics.engine_seconds.record(seconds)
        metrics.engine_cached.add(pieces.cached_tokens)
        finish = _FINISH[pieces.finish]
        message = await self._rendering.message(request, pieces.ids, finish, pieces.stop_string)
        return rollout_pb2.TurnResponse(
            rendered_ids=ids_bytes(rendered),
            sampled_ids=ids_bytes(pieces.ids),
            logprobs=logprobs_bytes(pieces.logprobs),
            versions=version_bytes(pieces.labels, versions),
            message=message,
            finish_reason=finish,
            policy_versions=in_order(versions),
            engine=self._engine,
            generation_s=seconds,
            cached_tokens=pieces.cached_tokens,
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
            *(
                self._core.score(sequence, temperature, salt=salt, urgent=request.probe)
                for sequence in sequences
            )
        )
        return rollout_pb2.ScoreTokensResponse(
            logprobs=[score.tobytes() for score in scores], version=version
        )

    def _check_whole(self, pieces: Pieces, carries: int) -> None:
        # A drained update waits for every turn; if one sees two sets of weights, the drain was none.
        if len({label for label, _ in pieces.labels}) > 1 and self._versions.carries == carries:
            raise Internal("The version changed during a turn", do="Pause the router before an update.")
