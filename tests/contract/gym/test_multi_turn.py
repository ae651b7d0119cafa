"""Several turns: exact prefixes, observations, tools, limits."""

from __future__ import annotations

import numpy as np
import pytest

from gym_svc.trajectory import column
from protos.headrace.v1 import types_pb2


def env_of(**options):
    options = {"path": "gym_test_plugin:Doubler", **options}
    return {"environments": {"doubler": {"max_turns": 3, "options": options}}}


ENV = env_of()
TOOLS = {"tools": [{"type": "function", "name": "double", "parameters": {"type": "object"}, "strict": False}]}


def ids_of(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i4").tolist()


def by_turn(*answers):
    return lambda request: answers[request.turn]


async def test_what_was_seen_is_the_exact_prefix_of_the_next_turn(stack, make, doubler):
    stack.rollout.reply = by_turn(
        make.answer("4", ids=[20, 21], rendered=[10, 11]),
        make.answer("4", ids=[40], rendered=[30, 31, 32], versions=np.array([4], "<i4").tobytes()),
    )
    await stack.finish(make.work(0, environment="doubler"), **ENV)
    first, second = stack.rollout.turns
    assert first.prefix_ids == b""
    assert [message.content for message in first.messages] == ["2+2?"]
    assert (second.turn, ids_of(second.prefix_ids)) == (1, [10, 11, 20, 21])
    assert [message.content for message in second.messages] == ["twice 4 is?"]
    assert first.run_seed == second.run_seed == 7
    (found,) = stack.buffer.appended
    assert column(found, "ids").tolist() == [10, 11, 20, 21, 30, 31, 32, 40]
    assert column(found, "mask").tolist() == [0, 0, 1, 1, 0, 0, 0, 1]
    assert column(found, "versions").tolist() == [-1, -1, 3, 3, -1, -1, -1, 4]
    segments = [(part.source, part.start, part.length, part.turn) for part in found.segments]
    assert segments == [
        (types_pb2.SEGMENT_SOURCE_PROMPT, 0, 2, 0),
        (types_pb2.SEGMENT_SOURCE_SAMPLED, 2, 2, 0),
        (types_pb2.SEGMENT_SOURCE_ENVIRONMENT, 4, 3, 1),
        (types_pb2.SEGMENT_SOURCE_SAMPLED, 7, 1, 1),
    ]
    assert [message.role for message in found.messages] == ["user", "assistant", "user", "assistant"]
    assert (found.turns, found.environment) == (2, "doubler")
    assert found.finish_reason == types_pb2.FINISH_REASON_STOP
    assert (doubler.opened, doubler.closed) == (1, 1)


async def test_the_turn_limit_ends_the_episode(stack, make, doubler):
    stack.rollout.reply = lambda request: make.answer("again", ids=[20], rendered=[10])
    await stack.finish(make.work(0, environment="doubler"), **env_of(limit=99))
    (found,) = stack.buffer.appended
    assert found.turns == 3
    assert len(stack.rollout.turns) == 3
    assert found.finish_reason == types_pb2.FINISH_REASON_ENVIRONMENT
    assert found.outcome == types_pb2.OUTCOME_COMPLETED


async def test_the_sequence_limit_bounds_each_turn_and_ends_the_episode(stack, make, doubler):
    stack.rollout.reply = lambda request: make.answer("again", ids=[20, 21], rendered=[10, 11])
    work = make.work(0, environment="doubler")
    await stack.finish(work, max_total_sequence_length=8, **env_of(limit=99))
    (found,) = stack.buffer.appended
    assert [request.sampling.max_new_tokens for request in stack.rollout.turns] == [8, 4]
    assert found.outcome == types_pb2.OUTCOME_TRUNCATED
    assert found.turns == 2


async def test_an_observation_that_fills_the_context_is_left_out(stack, make, doubler):
    full = types_pb2.FINISH_REASON_LENGTH
    stack.rollout.reply = by_turn(
        make.answer("4", ids=[20], rendered=[10]),
        make.answer("", ids=[], rendered=[30, 31], finish_reason=full),
    )
    await stack.finish(make.work(0, environment="doubler"), **ENV)
    (found,) = stack.buffer.appended
    assert column(found, "ids").tolist() == [10, 20]
    assert found.outcome == types_pb2.OUTCOME_TRUNCATED
    assert found.turns == 1


async def test_only_tools_of_the_row_reach_the_environment(stack, make, doubler):
    calls = [
        types_pb2.ToolCall(id="a", name="reset", arguments="{}"),
        types_pb2.ToolCall(id="b", name="double", arguments='{"x": 4}'),
        types_pb2.ToolCall(id="c", name="double", arguments="{broken"),
        types_pb2.ToolCall(id="d", name="double", arguments="[4]"),
    ]
    stack.rollout.reply = by_turn(
        make.answer("", ids=[20], rendered=[10], calls=calls),
        make.answer("4", ids=[40], rendered=[30]),
    )
    await stack.finish(make.work(0, environment="doubler", create=TOOLS), **ENV)
    told = {message.tool_call_id: message.content for message in stack.rollout.turns[1].messages}
    assert list(told) == ["a", "b", "c", "d"]
    assert "unknown tool 'reset'" in told["a"]
    assert told["b"] == "8"
    assert "not JSON" in told["c"]
    assert "not a JSON object" in told["d"]
    (found,) = stack.buffer.appended
    assert list(found.messages[1].tool_calls) == calls


async def test_an_environment_that_raises_is_an_environment_error_and_is_closed(stack, make, doubler):
    stack.rollout.reply = lambda request: make.answer("raise", ids=[20], rendered=[10])
    await stack.finish(make.work(0, environment="doubler"), **ENV)
    (failed,) = stack.buffer.failed
    assert failed.outcome == types_pb2.OUTCOME_ENVIRONMENT_ERROR
    assert "no such drawer" in failed.message
    assert doubler.closed == 1
    assert stack.reward.calls == []


async def test_an_environment_that_hangs_is_cut(stack, make, doubler):
    stack.rollout.reply = lambda request: make.answer("hang", ids=[20], rendered=[10])
    await stack.finish(make.work(0, environment="doubler"), environment_timeout_s=0.1, **ENV)
    assert "took longer than 0.1 s" in stack.buffer.failed[0].message


async def test_the_environments_seed_is_that_of_the_sample_not_of_the_attempt(stack, make, doubler):
    again = make.work(0, environment="doubler", attempt=2)
    await stack.finish(make.work(0, environment="doubler"), **ENV)
    stack.buffer.queue.extend([again, make.work(0, 1, environment="doubler")])
    await stack.buffer.until(lambda: len(stack.buffer.appended) == 3)
    first, second, other = doubler.seeds
    assert first == second
    assert other != first


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"environments": {"x": {"options": {"path": "no.such.module:Env"}}}}, "no.such.module:Env"),
        ({"environments": {"x": {"options": {"agent": "nobody"}}}}, "Unknown agent 'nobody'"),
        ({"environments": {"x": {"max_turns": 0}}}, "env.environments.x.max_turns"),
    ],
)
async def test_setup_refuses_what_does_not_exist(stack, env, said):
    from services.runtime.errors import InvalidInput

    with pytest.raises(InvalidInput, match=said.replace(".", r"\.")):
        await stack.setup(**env)
