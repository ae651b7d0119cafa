"""The other services as the controller sees them.

Invariants: ``Setup`` is idempotent everywhere, so bringing a restarted service back is the same call as the
first one; a service that cannot be reached is left for the next round, never treated as set up.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from protos.headrace.v1 import (
    buffer_pb2,
    buffer_pb2_grpc,
    refit_pb2,
    refit_pb2_grpc,
    reward_pb2,
    reward_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
    types_pb2,
)  # fmt: skip
from services.controller.settings import ControllerSettings
from services.recipe import Recipe
from services.runtime import rpc
from services.runtime.errors import HeadraceError, InvalidInput, Unsupported
from services.runtime.logs import get_logger

log = get_logger("controller")

REFUSALS = (InvalidInput, Unsupported)
Setup = Callable[[float], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class RunContext:
    """What every call of a run needs."""

    run: str
    recipe: Recipe
    recipe_json: str
    epoch: int
    checkpoint_dir: str

    def fence(self, step: int) -> types_pb2.Fence:
        """The fencing token of a command for ``step``."""
        return types_pb2.Fence(epoch=self.epoch, step=step)

    @property
    def supervised(self) -> bool:
        """Whether the run learns from given answers, without sampling and publishing."""
        return self.recipe.kind == "sft"

    @property
    def seed(self) -> int:
        """The run's seed: draws, sampling and training follow from it."""
        return self.recipe.seed

    @property
    def window(self) -> int:
        """W: how many steps dispatch may run ahead of the committed version."""
        ahead = self.recipe.grpo.async_grpo
        if self.supervised:
            return self.recipe.stack.prefetch_steps
        return ahead.max_trajectory_age_steps if ahead.enabled else 0

    @property
    def order(self) -> buffer_pb2.LeaseOrder.ValueType:
        """Which groups a step takes."""
        ready_first = self.recipe.stack.order == "ready_first"
        return buffer_pb2.LEASE_ORDER_READY_FIRST if ready_first else buffer_pb2.LEASE_ORDER_IN_ORDER


class Peers:
    """Typed stubs, and the one Setup that brings every service to a run."""

    def __init__(self, settings: ControllerSettings) -> None:
        self.buffer: buffer_pb2_grpc.BufferAsyncStub = rpc.stub(
            buffer_pb2_grpc.BufferStub, settings.buffer, name="buffer"
        )
        self.rewards: list[reward_pb2_grpc.RewardsAsyncStub] = [
            rpc.stub(reward_pb2_grpc.RewardsStub, address, name="reward")
            for address in settings.reward.split(",")
        ]
        self.rollout: rollout_pb2_grpc.RolloutAsyncStub = rpc.stub(
            rollout_pb2_grpc.RolloutStub, settings.rollout, name="rollout"
        )
        self.trainer: trainer_pb2_grpc.TrainerAsyncStub = rpc.stub(
            trainer_pb2_grpc.TrainerStub, settings.trainer, name="trainer"
        )
        self.refit: refit_pb2_grpc.RefitAsyncStub = rpc.stub(
            refit_pb2_grpc.RefitStub, settings.refit, name="refit"
        )

    def light_setups(self, ctx: RunContext) -> dict[str, Setup]:
        """Setup of everything but trainer and bridge, by service; each takes its timeout in seconds."""
        env = json.dumps(ctx.recipe.env.model_dump(mode="json"))
        reward = reward_pb2.RewardSetupRequest(run=ctx.run, env_json=env)
        calls: list[tuple[str, Callable[..., Awaitable[Any]], Any]]
        calls = [("buffer", self._setup_buffer, buffer_setup(ctx))]
        calls += [("rollout", self.rollout.Setup, rollout_setup(ctx))]
        calls += [(f"reward {i}", stub.Setup, reward) for i, stub in enumerate(self.rewards)]
        return {name: _bound(method, request) for name, method, request in calls}

    async def setup_light(self, ctx: RunContext, timeout: float) -> list[str]:
        """Set up everything but trainer and bridge; returns what could not be reached, in words.

        Raises InvalidInput or Unsupported when a service refuses the run: asking again would not help.
        """
        setups = self.light_setups(ctx)
        answers = await asyncio.gather(*(setup(timeout) for setup in setups.values()), return_exceptions=True)
        failed = []
        for name, answer in zip(setups, answers, strict=True):
            if isinstance(answer, HeadraceError) and not isinstance(answer, REFUSALS):
                failed.append(f"{name}: {answer}")
            elif isinstance(answer, BaseException):
                raise answer
        return failed

    async def _setup_buffer(self, request: buffer_pb2.BufferSetupRequest, *, timeout: float) -> None:
        """The run and the stack's assignment; raises InvalidInput when a gym worker refuses it."""
        answer: buffer_pb2.BufferSetupResponse = await self.buffer.Setup(request, timeout=timeout)
        if answer.gym_refusal:
            raise InvalidInput(f"A gym worker cannot work for the run: {answer.gym_refusal}", where="env")

    async def setup_trainer(self, ctx: RunContext, timeout: float) -> trainer_pb2.TrainerState:
        """Load the model and the newest complete checkpoint; returns where the trainer is."""
        request = trainer_pb2.TrainerSetupRequest(
            run=ctx.run, kind=ctx.recipe.kind, recipe_json=ctx.recipe_json,
            checkpoint_dir=ctx.checkpoint_dir, fence=ctx.fence(0), seed=ctx.seed,
        )  # fmt: skip
        return await self.trainer.Setup(request, timeout=timeout)

    async def setup_refit(self, ctx: RunContext, vocab_size: int, timeout: float) -> None:
        """Tell the bridge the run's probe and quorum; needs the trainer's vocabulary."""
        await self.refit.Setup(refit_setup(ctx, vocab_size), timeout=timeout)

    async def release(self, run: str) -> None:
        """Let the gym workers of the stack go: the run has ended."""
        try:
            await self.buffer.Release(buffer_pb2.ReleaseRequest(run=run), timeout=15)
        except HeadraceError as exc:
            log.warning("the gym workers were not released", error=str(exc))


def _bound(method: Callable[..., Awaitable[Any]], request: Any) -> Setup:
    return lambda timeout: method(request, timeout=timeout)


def gym_env(ctx: RunContext) -> str:
    """The env section, with the limits that a gym worker keeps."""
    stack = ctx.recipe.stack
    limits = {
        "claim_timeout_s": stack.claim_timeout_s,
        "sample_timeout_s": stack.sample_timeout_s,
        "max_total_sequence_length": ctx.recipe.policy.max_total_sequence_length,
    }
    return json.dumps(ctx.recipe.env.model_dump(mode="json") | limits)


def buffer_setup(ctx: RunContext) -> buffer_pb2.BufferSetupRequest:
    """Budgets and admission rules of a run."""
    stack = ctx.recipe.stack
    return buffer_pb2.BufferSetupRequest(
        run=ctx.run,
        infrastructure_attempts=stack.infrastructure_attempts,
        data_attempts=stack.data_attempts,
        claim_timeout_s=stack.claim_timeout_s,
        drop_zero_variance=ctx.recipe.grpo.use_dynamic_sampling,
        minimum_siblings=stack.minimum_siblings,
        max_age=None if ctx.supervised else ctx.window,
        gym=buffer_pb2.GymAssignment(run=ctx.run, env_json=gym_env(ctx), seed=ctx.seed),
    )


def rollout_setup(ctx: RunContext) -> rollout_pb2.RolloutSetupRequest:
    """The policy section, for renderer and engines."""
    policy = json.dumps(ctx.recipe.policy.model_dump(mode="json"))
    return rollout_pb2.RolloutSetupRequest(run=ctx.run, policy_json=policy, seed=ctx.seed)


def refit_setup(ctx: RunContext, vocab_size: int) -> refit_pb2.RefitSetupRequest:
    """Probe and quorum of a run; every version answers the same question."""
    stack, generation = ctx.recipe.stack, ctx.recipe.policy.generation
    ahead = ctx.recipe.grpo.async_grpo
    return refit_pb2.RefitSetupRequest(
        run=ctx.run,
        transport=stack.transport,
        min_engines=stack.min_engines,
        probe_sequences=probe_sequences(vocab_size, stack.probe_sequences, stack.probe_tokens),
        probe_tolerance=stack.probe_tolerance,
        probe_temperature=generation.temperature,
        fence=ctx.fence(0),
        in_flight=ahead.in_flight_weight_updates,
        recompute_kv_cache=ahead.recompute_kv_cache_after_weight_updates,
    )


def probe_sequences(vocab_size: int, count: int, tokens: int) -> list[bytes]:
    """The probe: int32 ids drawn once and for all from the vocabulary."""
    rng = np.random.default_rng(20)
    return [rng.integers(0, vocab_size, tokens, dtype=np.int32).tobytes() for _ in range(count)]
