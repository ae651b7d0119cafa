"""What an agent is, and the episode that it drives.

Invariants
- Every turn goes through :meth:`Episode.turn`, which sends the exact ids so far and records what came back.
- A failure leaves by exception (:class:`~gym_svc.failures.SampleError`); an agent that returns has a
  trajectory.
- Environment calls are bounded in time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from gym_svc.clients import Policy
from gym_svc.environments.base import Environment, EnvironmentFactory
from gym_svc.failures import ENVIRONMENT, INFRASTRUCTURE, SampleError, failed_environment
from gym_svc.rows import Row
from gym_svc.trajectory import Clock, Tokens
from protos.headrace.v1 import buffer_pb2, rollout_pb2, types_pb2
from services.runtime import tracing
from services.runtime.errors import Corrupt
from services.runtime.logs import get_logger

LENGTH = types_pb2.FINISH_REASON_LENGTH
Result = TypeVar("Result")


@dataclass(slots=True)
class Episode:
    """One sample at work. ``finish`` and ``messages`` are the agent's to set; the rest is recorded."""

    work: buffer_pb2.Work
    row: Row
    policy: Policy
    clock: Clock
    open_environment: EnvironmentFactory
    seed: int
    """For the environment; the same for every attempt."""
    max_turns: int
    max_tokens: int | None = None
    """Of the whole sequence."""
    environment_timeout_s: float = 60.0
    system_prompt: str = ""
    tokens: Tokens = field(default_factory=Tokens)
    messages: list[types_pb2.Message] = field(default_factory=list)
    versions: list[types_pb2.PolicyVersion] = field(default_factory=list)
    finish: types_pb2.FinishReason.ValueType = types_pb2.FINISH_REASON_UNSPECIFIED
    turns: int = 0
    engine: str = ""

    @property
    def room(self) -> int | None:
        """Tokens that may still be added; None without a limit."""
        return None if self.max_tokens is None else self.max_tokens - len(self.tokens)

    async def turn(self, new: Sequence[types_pb2.Message]) -> rollout_pb2.TurnResponse:
        """Let the policy answer ``new`` (all messages on the first turn) and record its turn."""
        request = self._request(new)
        started = time.perf_counter()
        with tracing.span("turn", attributes={"headrace.turn": self.turns}) as span:
            answer = await self.policy.turn(request)
            span.set_attribute("headrace.engine", answer.engine)
            span.set_attribute("headrace.sampled_tokens", len(answer.sampled_ids) // 4)
        self.clock.generation_s += time.perf_counter() - started
        self._record(answer)
        return answer

    def _request(self, new: Sequence[types_pb2.Message]) -> rollout_pb2.TurnRequest:
        request = rollout_pb2.TurnRequest(
            key=self.work.key, turn=self.turns, run_seed=self.work.run_seed,
            prefix_ids=bytes(self.tokens.ids), messages=new, tools_json=self.row.tools_json,
            sampling=self.work.sampling, chat_template_kwargs_json=self.row.chat_template_kwargs_json,
        )  # fmt: skip
        limits = [limit for limit in (self.row.max_output_tokens, self.room) if limit is not None]
        if self.work.sampling.HasField("max_new_tokens"):
            limits.append(self.work.sampling.max_new_tokens)
        if limits:
            request.sampling.max_new_tokens = max(1, min(limits))
        return request

    def _record(self, answer: rollout_pb2.TurnResponse) -> None:
        if answer.finish_reason not in (types_pb2.FINISH_REASON_STOP, LENGTH):
            raise SampleError(INFRASTRUCTURE, f"The engine ended turn {self.turns} without a finish reason")
        self.finish = answer.finish_reason
        if not answer.sampled_ids:
            self._record_nothing()
            return
        try:
            self.tokens.add_turn(self.turns, answer)
        except Corrupt as exc:
            raise SampleError(INFRASTRUCTURE, str(exc)) from exc
        self.turns += 1
        self.engine = answer.engine
        self.messages.append(answer.message)
        self.versions.extend(version for version in answer.policy_versions if version not in self.versions)

    def _record_nothing(self) -> None:
        # The last observation filled the context: it is left out, since nothing that trains follows it.
        if self.turns == 0:
            raise SampleError(ENVIRONMENT, f"The prompt leaves no room for an answer ({self.row.source})")
        self.finish = LENGTH

    async def environment(self, call: Awaitable[Result], what: str) -> Result:
        """Await one call of the environment within its time limit."""
        started = time.perf_counter()
        try:
            async with asyncio.timeout(self.environment_timeout_s):
                return await call
        except TimeoutError as exc:
            text = f"environment {what} took longer than {self.environment_timeout_s:g} s"
            raise SampleError(ENVIRONMENT, text) from exc
        except Exception as exc:
            raise failed_environment(exc, f"environment {what}") from exc
        finally:
            self.clock.environment_s += time.perf_counter() - started

    async def close(self, environment: Environment) -> None:
        """Close ``environment``; a failure to do so is logged and costs no sample."""
        try:
            await self.environment(environment.close(), "close")
        except SampleError as exc:
            get_logger("gym").warning("environment did not close", error=exc.message)


class Agent(Protocol):
    """Drives an episode to its end."""

    @property
    def rewarded(self) -> bool:
        """Whether its samples are scored."""
        ...

    async def run(self, episode: Episode) -> None:
        """Play ``episode``; raises SampleError."""
        ...
