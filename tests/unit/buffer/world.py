"""What buffer tests do again and again: make trajectories, dispatch, work, admit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from protos.headrace.v1 import buffer_pb2 as pb
from protos.headrace.v1 import types_pb2 as types
from services.buffer.admit import Admission
from services.buffer.steps import Steps
from services.buffer.store import Store
from services.buffer.transitions import Transitions

RUN = "run-1"
PROMPT = (5, 6, 7, 8)


def trajectory(
    work: pb.Work,
    *,
    reward: float | None = 1.0,
    prompt: Sequence[int] = PROMPT,
    sampled: Sequence[int] = (11, 12, 13),
    version: int = 0,
) -> types.Trajectory:
    """A single-turn trajectory for ``work``."""
    p, s = len(prompt), len(sampled)
    columns = {
        "ids": np.array([*prompt, *sampled], "<i4"),
        "logprobs": np.array([0.0] * p + [-0.5] * s, "<f4"),
        "versions": np.array([-1] * p + [version] * s, "<i4"),
        "mask": np.array([0] * p + [1] * s, "u1"),
    }
    dtypes = {
        "ids": types.DTYPE_INT32,
        "logprobs": types.DTYPE_FLOAT32,
        "versions": types.DTYPE_INT32,
        "mask": types.DTYPE_UINT8,
    }
    return types.Trajectory(
        key=work.key,
        attempt=work.attempt,
        outcome=types.OUTCOME_COMPLETED,
        reward=None if reward is None else types.Reward(value=reward),
        segments=[
            types.Segment(source=types.SEGMENT_SOURCE_PROMPT, start=0, length=p),
            types.Segment(source=types.SEGMENT_SOURCE_SAMPLED, start=p, length=s),
        ],
        columns=[
            types.Column(name=name, dtype=dtypes[name], shape=[p + s], data=values.tobytes())
            for name, values in columns.items()
        ],
        finish_reason=types.FINISH_REASON_STOP,
        policy_versions=[types.PolicyVersion(number=version)],
        trace=work.trace,
        turns=1,
    )


def spec(group: int, *, samples: int = 4, step: int = 0, row: str = '{"q": 1}') -> pb.GroupSpec:
    """A group to dispatch, with a root trace for each sample."""
    return pb.GroupSpec(
        group=group,
        samples=samples,
        target_step=step,
        row_json=row,
        row_source=f"rows.jsonl:{group}",
        run_seed=7,
        sampling=types.SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=8),
        traces=[
            types.TraceContext(traceparent=f"00-{group + 1:032x}-{sample + 1:016x}-01")
            for sample in range(samples)
        ],
        agent=types.AgentRef(type="responses_api_agents", name="single_turn"),
    )


def setup(**changes: object) -> pb.BufferSetupRequest:
    """A Setup with small budgets."""
    values: dict[str, object] = {
        "run": RUN, "infrastructure_attempts": 3, "data_attempts": 2, "claim_timeout_s": 30.0,
    }  # fmt: skip
    return pb.BufferSetupRequest(**{**values, **changes})  # type: ignore[arg-type]


@dataclass
class World:
    """A store and shorthands."""

    do: Transitions
    store: Store
    steps: Steps

    async def setup(self, **changes: object) -> None:
        await self.store.setup(setup(**changes))

    async def open(self, *specs: pb.GroupSpec, epoch: int = 1, book: str = "train") -> tuple[int, int]:
        fence = types.Fence(epoch=epoch)
        return await self.store.open_groups(
            pb.OpenGroupsRequest(run=RUN, book=book, fence=fence, groups=specs)
        )

    async def claim(self, most: int = 64, worker: str = "w1") -> list[pb.Work]:
        return await self.store.claim(RUN, worker, most)

    async def append(self, *trajectories: types.Trajectory) -> list[int]:
        return [result.status for result in await self.store.append(RUN, trajectories)]

    async def admit(self, consumer: str = "replica-1") -> int:
        return await Admission(self.do, RUN, consumer).take_new(None)

    async def finish(self, rewards: Sequence[float] = (0.0, 1.0, 0.0, 1.0)) -> list[pb.Work]:
        """Claim all, append all with rewards by sample, admit."""
        work = await self.claim(1024)
        await self.append(*[trajectory(w, reward=rewards[w.key.sample % len(rewards)]) for w in work])
        await self.admit()
        return work

    async def lease(
        self, step: int = 0, *, groups: int = 1, epoch: int = 1, version: int = 0
    ) -> pb.LeaseResponse:
        fence = types.Fence(epoch=epoch, step=step)
        return await self.steps.lease(pb.LeaseRequest(run=RUN, fence=fence, groups=groups, version=version))

    async def commit(self, step: int = 0, epoch: int = 1) -> tuple[int, int]:
        return await self.steps.commit(RUN, types.Fence(epoch=epoch, step=step))

    async def fail(self, *work: pb.Work, outcome: int = types.OUTCOME_INFRASTRUCTURE_ERROR) -> list[int]:
        failures = [
            pb.FailedSample(ref=pb.ClaimRef(key=w.key, attempt=w.attempt), outcome=outcome, message="broke")  # type: ignore[arg-type]
            for w in work
        ]
        return list(await self.store.fail(RUN, failures))
