"""The general agent: policy and environment take turns.

Invariants
- Bounded by turns (model calls) and by tokens; a turn without content or calls counts like any other.
- A call of a tool that the row does not offer, or with arguments that are no JSON object, never reaches the
  environment: the agent answers it with an error text that the policy sees.
- The answer that a token limit cut is the last: its calls are not executed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from gym_svc.agent.base import LENGTH, Episode
from gym_svc.environments.base import Environment, Step
from gym_svc.failures import ENVIRONMENT, SampleError
from protos.headrace.v1 import types_pb2

BY_ENVIRONMENT = types_pb2.FINISH_REASON_ENVIRONMENT


class MultiTurn:
    """Turns until the environment, the policy or a limit ends the episode."""

    rewarded = True

    async def run(self, episode: Episode) -> None:
        """See :class:`gym_svc.agent.base.Agent`."""
        environment = episode.open_environment()
        try:
            new: Sequence[types_pb2.Message] = await first_messages(episode, environment)
            for _ in range(episode.max_turns):
                new = await self._turn(episode, environment, new)
                if not new:
                    return
            episode.finish = BY_ENVIRONMENT
        finally:
            await episode.close(environment)

    async def _turn(
        self, episode: Episode, environment: Environment, new: Sequence[types_pb2.Message]
    ) -> Sequence[types_pb2.Message]:
        """One turn and the environment's answer to it; nothing when the episode is over."""
        turns = episode.turns
        answer = await episode.turn(new)
        if episode.turns == turns or answer.finish_reason == LENGTH:
            return ()
        step = await self._observe(episode, environment, answer.message)
        episode.messages.extend(step.messages)
        if step.done or not step.messages:
            if step.messages or answer.message.tool_calls:
                episode.finish = BY_ENVIRONMENT
            return ()
        if episode.room is not None and episode.room <= 0:
            episode.finish = LENGTH
            return ()
        return step.messages

    async def _observe(self, episode: Episode, environment: Environment, said: types_pb2.Message) -> Step:
        checked = [(call, refusal(call, episode.row.tool_names)) for call in said.tool_calls]
        answers = [tool_message(call, text) for call, text in checked if text]
        if not answers:
            return await episode.environment(environment.step(said), "step")
        allowed = [call for call, text in checked if not text]
        if not allowed:
            return Step(messages=answers)
        seen = types_pb2.Message()
        seen.CopyFrom(said)
        del seen.tool_calls[:]
        seen.tool_calls.extend(allowed)
        step = await episode.environment(environment.step(seen), "step")
        return Step(messages=_in_call_order(said, [*answers, *step.messages]), done=step.done)


async def first_messages(episode: Episode, environment: Environment) -> list[types_pb2.Message]:
    """Reset ``environment``; its messages (with the system prompt, if the row has none) open the episode."""
    found = list(await episode.environment(environment.reset(episode.row, seed=episode.seed), "reset"))
    if not found:
        raise SampleError(ENVIRONMENT, "environment reset gave no message")
    if episode.system_prompt and found[0].role != "system":
        found.insert(0, types_pb2.Message(role="system", content=episode.system_prompt))
    episode.messages.extend(found)
    return found


def refusal(call: types_pb2.ToolCall, allowed: frozenset[str]) -> str:
    """Why ``call`` must not be executed, as JSON for the policy; empty when it may be."""
    if call.name not in allowed:
        return json.dumps({"error": f"unknown tool {call.name!r}", "tools": sorted(allowed)})
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError as exc:
        return json.dumps({"error": f"arguments are not JSON: {exc}"})
    return "" if isinstance(arguments, dict) else json.dumps({"error": "arguments are not a JSON object"})


def tool_message(call: types_pb2.ToolCall, content: str) -> types_pb2.Message:
    """The message that answers ``call``."""
    return types_pb2.Message(role="tool", content=content, tool_call_id=call.id, name=call.name)


def _in_call_order(
    said: types_pb2.Message, messages: Sequence[types_pb2.Message]
) -> Sequence[types_pb2.Message]:
    order = {call.id: index for index, call in enumerate(said.tool_calls)}
    return sorted(messages, key=lambda message: order.get(message.tool_call_id, len(order)))
