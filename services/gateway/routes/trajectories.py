"""Groups of trajectories: lists of a book, and one group with its conversations, rewards and tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, Field

from protos.headrace.v1 import buffer_pb2, types_pb2
from services.gateway.requests import Book, RunId, ThePeers
from services.gateway.wire import column, finite, numbers, seconds, word
from services.runtime.errors import Exhausted

router = APIRouter(tags=["trajectories"])
MOST_GROUPS = 1000
# One group of 64 samples of 32,768 tokens; more would not do a browser any good.
MOST_BYTES = 64 * 1024 * 1024
State = Annotated[
    str, Query(pattern="^(|open|complete|ready|leased|trained|durable|dropped)$", description="Empty is any.")
]


class Timing(BaseModel):
    """Where a sample's time went, in seconds; started and ended since 1970."""

    queued_s: float
    generation_s: float
    environment_s: float
    reward_s: float
    started: float | None
    ended: float | None


class SampleSummary(BaseModel):
    """One sample without its tokens."""

    sample: int
    attempt: int
    outcome: str
    tokens: int
    sampled_tokens: int
    reward: float | None
    version: int | None = Field(description="Lowest version that sampled a token.")
    highest_version: int | None
    traceparent: str
    timing: Timing


class Group(BaseModel):
    """One group without its tokens."""

    group: int
    state: str
    target_step: int
    trained_step: int | None
    drop_reason: str
    size: int
    row_source: str
    payloads: bool = Field(description="Whether its trajectories can still be fetched.")
    samples: list[SampleSummary]


class GroupPage(BaseModel):
    """``next`` is the cursor of the next page, null on the last."""

    groups: list[Group]
    next: int | None


class ToolCall(BaseModel):
    """A tool call as the model wrote it."""

    id: str
    name: str
    arguments: str


class Message(BaseModel):
    """One message of the conversation."""

    role: str
    content: str
    reasoning: str
    name: str
    tool_call_id: str
    tool_calls: list[ToolCall]


class RewardStage(BaseModel):
    """One stage on the way to the reward."""

    name: str
    value: float | None


class Reward(BaseModel):
    """The reward that the trainer reads, with every stage that led to it."""

    value: float | None
    verifier: str
    stages: list[RewardStage]
    components: dict[str, float | None]


class Segment(BaseModel):
    """A run of tokens with one source: prompt, sampled or environment."""

    source: str
    start: int
    length: int
    turn: int


class Version(BaseModel):
    """A version of the policy."""

    incarnation: int
    number: int
    digest: str


class Trajectory(BaseModel):
    """One sample, whole."""

    sample: int
    attempt: int
    outcome: str
    finish_reason: str
    reward: Reward | None
    turns: int
    agent: str
    environment: str
    engine: str
    worker: str
    traceparent: str
    timing: Timing
    policy_versions: list[Version]
    messages: list[Message]
    segments: list[Segment]
    columns: dict[str, list[Any]] = Field(
        description="Token-aligned: ids, logprobs (0 where not sampled), versions (-1), mask."
    )


class GroupTrajectories(BaseModel):
    """The trajectories of one group."""

    group: int
    trajectories: list[Trajectory]


@router.get("/runs/{run}/groups")
async def list_groups(
    run: RunId,
    peers: ThePeers,
    book: Book = "train",
    state: State = "",
    limit: Annotated[int, Query(ge=1, le=MOST_GROUPS)] = 100,
    cursor: Annotated[int | None, Query(ge=0, lt=2**63, description="`next` of the page before.")] = None,
    newest: bool = False,
) -> GroupPage:
    """Groups of a book by ordinal; with `newest` the highest ones first."""
    start = cursor or 0
    # For the highest ones the contract's 0 means all, so the very last group is asked for by itself.
    last = newest and cursor == 0
    request = buffer_pb2.ListGroupsRequest(
        run=run,
        book=book,
        state=state,
        from_group=start,
        limit=1 if last else limit,
        newest=newest and not last,
    )
    found = list((await peers.buffer.ListGroups(request)).groups)
    if last:
        found = [group for group in found if group.group == 0]
    found.sort(key=lambda group: group.group, reverse=newest)
    return GroupPage(groups=[_group(group) for group in found], next=_next(found, limit, newest and not last))


@router.get("/runs/{run}/groups/{group}/trajectories")
async def trajectories(
    run: RunId,
    group: Annotated[int, Path(ge=0, lt=2**63)],
    peers: ThePeers,
    book: Book = "train",
    sample: Annotated[int | None, Query(ge=0, description="Only this one.")] = None,
    tokens: Annotated[bool, Query(description="Whether to send the token columns.")] = True,
) -> GroupTrajectories:
    """One group's trajectories: conversation, reward by stage, tokens, versions, timing."""
    request = buffer_pb2.FetchRequest(run=run, book=book, groups=[group])
    chunks: Any = peers.buffer.Fetch(request)
    data = await _joined(chunks)
    found = buffer_pb2.TrajectoryGroup.FromString(data)
    wanted = [one for one in found.trajectories if sample is None or one.key.sample == sample]
    return GroupTrajectories(group=group, trajectories=[_trajectory(one, tokens) for one in wanted])


async def _joined(chunks: AsyncIterator[types_pb2.Chunk]) -> bytes:
    data = bytearray()
    async for chunk in chunks:
        data += chunk.data
        if len(data) > MOST_BYTES:
            raise Exhausted(
                "The group is too large for JSON", where="gateway", do="Use Buffer.Fetch over gRPC."
            )
    return bytes(data)


def _next(found: list[Any], limit: int, newest: bool) -> int | None:
    if len(found) < limit:
        return None
    edge = int(found[-1].group)
    if not newest:
        return edge + 1
    return edge - 1 if edge else None


def _timing(found: types_pb2.SampleTiming) -> Timing:
    return Timing(
        queued_s=found.queued_s, generation_s=found.generation_s, environment_s=found.environment_s,
        reward_s=found.reward_s, started=seconds(found.started_ns), ended=seconds(found.ended_ns),
    )  # fmt: skip


def _outcome(value: int) -> str:
    return word(types_pb2.Outcome, value, "OUTCOME_")


def _group(found: buffer_pb2.GroupSummary) -> Group:
    return Group(
        group=found.group, state=found.state, target_step=found.target_step,
        trained_step=found.trained_step if found.HasField("trained_step") else None,
        drop_reason=found.drop_reason, size=found.size, row_source=found.row_source, payloads=found.payloads,
        samples=[_sample(one) for one in found.samples],
    )  # fmt: skip


def _sample(found: buffer_pb2.ManifestSample) -> SampleSummary:
    return SampleSummary(
        sample=found.sample, attempt=found.attempt, outcome=_outcome(found.outcome), tokens=found.tokens,
        sampled_tokens=found.sampled_tokens, traceparent=found.trace.traceparent,
        timing=_timing(found.timing),
        reward=finite(found.reward) if found.HasField("reward") else None,
        version=found.version if found.HasField("version") else None,
        highest_version=found.highest_version if found.HasField("highest_version") else None,
    )  # fmt: skip


def _trajectory(found: types_pb2.Trajectory, tokens: bool) -> Trajectory:
    return Trajectory(
        sample=found.key.sample, attempt=found.attempt, outcome=_outcome(found.outcome),
        finish_reason=word(types_pb2.FinishReason, found.finish_reason, "FINISH_REASON_"),
        reward=_reward(found.reward) if found.HasField("reward") else None,
        turns=found.turns, agent=found.agent.name, environment=found.environment, engine=found.engine,
        worker=found.worker, traceparent=found.trace.traceparent, timing=_timing(found.timing),
        policy_versions=[
            Version(incarnation=one.incarnation, number=one.number, digest=one.digest)
            for one in found.policy_versions
        ],
        messages=[_message(one) for one in found.messages],
        segments=[
            Segment(
                source=word(types_pb2.SegmentSource, one.source, "SEGMENT_SOURCE_"),
                start=one.start, length=one.length, turn=one.turn,
            )
            for one in found.segments
        ],
        columns={one.name: column(one) for one in found.columns} if tokens else {},
    )  # fmt: skip


def _reward(found: types_pb2.Reward) -> Reward:
    stages = [RewardStage(name=stage.name, value=finite(stage.value)) for stage in found.stages]
    return Reward(
        value=finite(found.value),
        verifier=found.verifier,
        stages=stages,
        components=numbers(found.components),
    )


def _message(found: types_pb2.Message) -> Message:
    calls = [ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in found.tool_calls]
    return Message(
        role=found.role, content=found.content, reasoning=found.reasoning, name=found.name,
        tool_call_id=found.tool_call_id, tool_calls=calls,
    )  # fmt: skip
