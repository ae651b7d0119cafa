"""Scores the items of a run.

Invariants
- One result for each item, in order; an item that cannot be judged fails alone.
- A failure names its kind: the verifier's (it raised, hung, crashed, answered nonsense) or infrastructure (no
  process became free before the call's deadline). It is never a score.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from typing import Any

from protos.headrace.v1 import reward_pb2, types_pb2
from reward_svc.config import EnvConfig
from reward_svc.isolation import IsolationError, PoolBusyError, VerifierPool
from reward_svc.transforms import build_reward, transforms_of
from reward_svc.verifiers.base import Item, Score, VerifierError, as_score
from reward_svc.verifiers.registry import Verifier, unknown, verifiers_of
from services.runtime import metrics, tracing
from services.runtime.errors import HeadraceError
from services.runtime.logs import bind_ids, get_logger

VERIFIER_ERROR = types_pb2.OUTCOME_VERIFIER_ERROR
INFRASTRUCTURE_ERROR = types_pb2.OUTCOME_INFRASTRUCTURE_ERROR
# Left for the answer to travel when a call's deadline bounds the wait.
MARGIN_S = 1.0
MAX_MESSAGE = 500


class Scoring:
    """The verifiers and transforms of one run; raises InvalidInput when one does not exist."""

    def __init__(self, run: str, env: EnvConfig, pool: VerifierPool, *, time_limit_s: float) -> None:
        self.run = run
        self.verifiers = verifiers_of(env, time_limit_s=time_limit_s)
        self._transforms = transforms_of(env)
        self._pool = pool
        for name in sorted(env.named_verifiers):
            if self.verifiers[name].path:
                pool.warm(self.verifiers[name].path)

    async def score(self, item: reward_pb2.RewardItem, seconds: float) -> reward_pb2.RewardResult:
        """The result of one item within about ``seconds``."""
        parent = tracing.context_from(item.trace.traceparent)
        key = item.key
        started = time.perf_counter()
        with (
            bind_ids(run=self.run, group=str(key.group), sample=key.sample),
            tracing.span(
                "reward.score", parent=parent, attributes={"headrace.verifier": item.verifier}
            ) as span,
        ):
            result = await self._result(item, seconds)
            result.seconds = time.perf_counter() - started
            how = "failed" if result.HasField("failure") else "scored"
            metrics.reward_seconds.record(result.seconds, {"verifier": item.verifier, "result": how})
            if result.HasField("failure"):
                span.set_attribute("headrace.failure", result.failure.message)
                get_logger("reward").warning(
                    "no reward", verifier=item.verifier, error=result.failure.message
                )
        return result

    async def _result(self, item: reward_pb2.RewardItem, seconds: float) -> reward_pb2.RewardResult:
        try:
            verifier = self.verifiers.get(item.verifier)
            if verifier is None:
                raise VerifierError(str(unknown(item.verifier, self.verifiers)))
            score = await self._judge(verifier, item_of(item, verifier), seconds)
        except PoolBusyError as exc:
            return _failure(INFRASTRUCTURE_ERROR, exc)
        except (VerifierError, IsolationError, HeadraceError) as exc:
            return _failure(VERIFIER_ERROR, exc)
        return reward_pb2.RewardResult(reward=build_reward(item.verifier, score, self._transforms))

    async def _judge(self, verifier: Verifier, item: Item, seconds: float) -> Score:
        if verifier.scorer is None:
            limit = verifier.time_limit_s
            wait = max(0.0, seconds - limit - MARGIN_S)
            given = await self._pool.score(verifier.path, item.to_json(), time_limit=limit, wait=wait)
            return as_score(Score(given["value"], given.get("components", {})))
        try:
            async with asyncio.timeout(verifier.time_limit_s):
                result = verifier.scorer(item)
                return as_score(await result if inspect.isawaitable(result) else result)
        except TimeoutError as exc:
            raise VerifierError(f"took longer than {verifier.time_limit_s:g} s") from exc
        except VerifierError:
            raise
        except Exception as exc:
            raise VerifierError(f"{type(exc).__name__}: {exc}") from exc


def item_of(item: reward_pb2.RewardItem, verifier: Verifier) -> Item:
    """The verifier's view of ``item``; raises VerifierError when its row is no JSON object."""
    try:
        row = json.loads(item.row_json)
    except ValueError as exc:
        raise VerifierError(f"the row is not JSON: {exc}") from exc
    if not isinstance(row, dict):
        raise VerifierError("the row is not a JSON object")
    truncated = item.outcome == types_pb2.OUTCOME_TRUNCATED
    return Item(
        row=row, messages=[_message(message) for message in item.messages],
        outcome="truncated" if truncated else "completed", options=dict(verifier.options),
    )  # fmt: skip


def _message(message: types_pb2.Message) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    for name in ("reasoning", "tool_call_id", "name"):
        if getattr(message, name):
            found[name] = getattr(message, name)
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id, "name": call.name, "arguments": call.arguments} for call in message.tool_calls
        ]
    return found


def _failure(outcome: types_pb2.Outcome.ValueType, exc: Exception) -> reward_pb2.RewardResult:
    failure = reward_pb2.RewardFailure(outcome=outcome, message=str(exc)[:MAX_MESSAGE])
    return reward_pb2.RewardResult(failure=failure)
