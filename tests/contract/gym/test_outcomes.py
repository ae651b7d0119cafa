"""How samples end: a trajectory with a reward, or a failure of the right kind, never a reward of 0."""

from __future__ import annotations

import asyncio

import grpc
import numpy as np
import pytest

from gym_svc.trajectory import column
from protos.headrace.v1 import buffer_pb2, reward_pb2, types_pb2


async def test_a_single_turn_becomes_one_whole_trajectory(stack, make):
    await stack.finish(make.work(0))
    (found,) = stack.buffer.appended
    assert found.outcome == types_pb2.OUTCOME_COMPLETED
    assert found.reward.value == 1.0
    assert found.finish_reason == types_pb2.FINISH_REASON_STOP
    assert column(found, "ids").tolist() == [5, 6, 7, 9, 2]
    assert column(found, "logprobs").tolist() == [0, 0, 0, -0.5, -0.5]
    assert column(found, "versions").tolist() == [-1, -1, -1, 3, 3]
    assert column(found, "mask").tolist() == [0, 0, 0, 1, 1]
    segments = [(part.source, part.start, part.length) for part in found.segments]
    assert segments == [
        (types_pb2.SEGMENT_SOURCE_PROMPT, 0, 3),
        (types_pb2.SEGMENT_SOURCE_SAMPLED, 3, 2),
    ]
    assert [message.role for message in found.messages] == ["user", "assistant"]
    assert (found.turns, found.attempt, found.engine) == (1, 1, "engine-1")
    assert found.environment == "single_turn"
    assert found.agent.name == "single_turn"
    assert [version.number for version in found.policy_versions] == [3]
    assert found.timing.ended_ns > found.timing.started_ns > 0
    assert found.timing.generation_s > 0
    assert stack.buffer.failed == []


async def test_an_answer_cut_by_length_is_truncated_and_still_judged(stack, make):
    stack.rollout.reply = lambda request: make.answer(
        "3", ids=[9], rendered=[5], finish_reason=types_pb2.FINISH_REASON_LENGTH
    )
    await stack.finish(make.work(0))
    (found,) = stack.buffer.appended
    assert found.outcome == types_pb2.OUTCOME_TRUNCATED
    assert found.reward.value == 0.0
    assert stack.reward.calls[0].items[0].outcome == types_pb2.OUTCOME_TRUNCATED


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (grpc.StatusCode.DEADLINE_EXCEEDED, types_pb2.OUTCOME_INFRASTRUCTURE_ERROR),
        (grpc.StatusCode.INTERNAL, types_pb2.OUTCOME_INFRASTRUCTURE_ERROR),
        (grpc.StatusCode.INVALID_ARGUMENT, types_pb2.OUTCOME_ENVIRONMENT_ERROR),
    ],
)
@pytest.mark.parametrize("peer", ["rollout", "reward"])
async def test_a_failed_call_is_a_failure_of_its_kind(stack, make, peer, code, outcome):
    getattr(stack, peer).abort = (code, "out of order")
    await stack.finish(make.work(0))
    (failed,) = stack.buffer.failed
    assert failed.outcome == outcome
    assert "out of order" in failed.message
    assert (failed.ref.key.group, failed.ref.attempt) == (0, 1)
    assert stack.buffer.appended == []


async def test_a_verifier_that_fails_costs_its_own_sample_only(stack, make):
    failure = reward_pb2.RewardFailure(outcome=types_pb2.OUTCOME_VERIFIER_ERROR, message="hung")

    def reply(item):
        if item.key.group == 1:
            return reward_pb2.RewardResult(failure=failure)
        return stack.reward.judge(item)

    stack.reward.reply = reply
    await stack.finish(*(make.work(group) for group in range(3)))
    assert [(item.ref.key.group, item.outcome) for item in stack.buffer.failed] == [
        (1, types_pb2.OUTCOME_VERIFIER_ERROR)
    ]
    assert "hung" in stack.buffer.failed[0].message
    assert sorted(item.key.group for item in stack.buffer.appended) == [0, 2]


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": np.array([np.nan], "<f4").tobytes()},
        {"versions": b""},
        {"finish_reason": types_pb2.FINISH_REASON_ABORTED},
    ],
)
async def test_a_broken_turn_is_an_infrastructure_failure(stack, make, fields):
    stack.rollout.reply = lambda request: make.answer("4", ids=[9], rendered=[5], **fields)
    await stack.finish(make.work(0))
    assert [item.outcome for item in stack.buffer.failed] == [types_pb2.OUTCOME_INFRASTRUCTURE_ERROR]
    assert stack.buffer.appended == []


async def test_a_prompt_without_room_for_an_answer_is_the_rows_fault(stack, make):
    stack.rollout.reply = lambda request: make.answer(
        "", ids=[], rendered=[5, 6], finish_reason=types_pb2.FINISH_REASON_LENGTH
    )
    await stack.finish(make.work(4))
    (failed,) = stack.buffer.failed
    assert failed.outcome == types_pb2.OUTCOME_ENVIRONMENT_ERROR
    assert "train.jsonl:5" in failed.message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"row_json": "{}"}, "responses_create_params is missing"),
        ({"row_json": "not json"}, "not JSON"),
        ({"agent": types_pb2.AgentRef(name="nobody")}, "unknown agent 'nobody'"),
    ],
)
async def test_a_bad_row_is_named_with_its_file_and_line(stack, make, change, said):
    work = make.work(4)
    for name, value in change.items():
        if isinstance(value, str):
            setattr(work, name, value)
        else:
            getattr(work, name).CopyFrom(value)
    await stack.finish(work)
    (failed,) = stack.buffer.failed
    assert failed.outcome == types_pb2.OUTCOME_ENVIRONMENT_ERROR
    assert "train.jsonl:5" in failed.message
    assert said in failed.message
    assert stack.rollout.turns == []


async def test_a_row_that_nothing_verifies_is_refused_before_it_is_sampled(stack, make):
    await stack.finish(make.work(0), default_verifier=None)
    (failed,) = stack.buffer.failed
    assert "names no verifier" in failed.message
    assert stack.rollout.turns == []


async def test_the_rows_verifier_wins_over_the_default(stack, make):
    await stack.finish(make.work(0, verifier="math_verify"), make.work(1))
    named = {item.key.group: item.verifier for call in stack.reward.calls for item in call.items}
    assert named == {0: "math_verify", 1: "exact_answer"}


async def test_supervised_rows_are_rendered_and_not_judged(stack, make):
    await stack.finish(make.work(0, agent="supervised", target="4"), default_verifier=None)
    (found,) = stack.buffer.appended
    assert not found.HasField("reward")
    assert found.outcome == types_pb2.OUTCOME_COMPLETED
    assert column(found, "mask").tolist() == [0, 0, 1, 1]
    assert column(found, "versions").tolist() == [-1] * 4
    assert types_pb2.SEGMENT_SOURCE_SAMPLED not in [part.source for part in found.segments]
    assert [message.content for message in found.messages] == ["2+2?", "4"]
    conversation = stack.rollout.renders[0].conversations[0]
    assert not conversation.add_generation_prompt
    assert stack.rollout.turns == []
    assert stack.reward.calls == []


async def test_supervised_rows_need_a_target(stack, make):
    await stack.finish(make.work(0, agent="supervised"))
    assert "needs a target" in stack.buffer.failed[0].message


async def test_a_duplicate_is_an_answer_like_any_other(stack, make):
    stack.buffer.status = buffer_pb2.APPEND_STATUS_DUPLICATE
    await stack.finish(make.work(0))
    await asyncio.sleep(0.05)
    assert stack.buffer.failed == []
    assert len(stack.buffer.appended) == 1


async def test_a_refused_trajectory_does_not_take_its_batch_with_it(stack, make):
    async def refuse(request, context):
        if any(item.key.group == 1 for item in request.trajectories):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "group 1 is odd")

    stack.buffer.append_hook = refuse
    await stack.finish(*(make.work(group) for group in range(3)))
    assert sorted(item.key.group for item in stack.buffer.appended) == [0, 2]
    (failed,) = stack.buffer.failed
    assert "group 1 is odd" in failed.message


async def test_an_append_is_repeated_until_the_buffer_is_back(stack, make):
    refusals = iter(range(3))

    async def away(request, context):
        if next(refusals, None) is not None:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "busy")

    stack.buffer.append_hook = away
    await stack.finish(make.work(0))
    assert len(stack.buffer.appended) == 1
    assert stack.buffer.failed == []


async def test_large_trajectories_travel_as_a_stream(stack, make):
    ids = list(range(1, 60_001))
    stack.rollout.reply = lambda request: make.answer("4", ids=ids, rendered=[5])
    await stack.finish(make.work(0))
    assert stack.buffer.streams == 1
    assert column(stack.buffer.appended[0], "ids").tolist() == [5, *ids]
