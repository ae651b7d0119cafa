"""The agent of supervised data: renders the row's conversation and its target instead of sampling.

Invariants: mask is 1 on the assistant's tokens as the rollout service renders them; there is no version, no
log-probability and no reward.
"""

from __future__ import annotations

from gym_svc.agent.base import Episode
from gym_svc.failures import ENVIRONMENT, INFRASTRUCTURE, SampleError
from gym_svc.rows import Row, bad_row
from protos.headrace.v1 import rollout_pb2, types_pb2
from services.runtime import tracing
from services.runtime.errors import Corrupt


class Supervised:
    """One rendering, no reward."""

    rewarded = False

    async def run(self, episode: Episode) -> None:
        """See :class:`gym_svc.agent.base.Agent`."""
        episode.messages.extend(conversation(episode.row, episode.system_prompt))
        request = rollout_pb2.Conversation(
            messages=episode.messages,
            tools_json=episode.row.tools_json,
            chat_template_kwargs_json=episode.row.chat_template_kwargs_json,
            add_generation_prompt=False,
        )
        with tracing.span("render"):
            rendered = await episode.policy.render(request)
        try:
            episode.tokens.add_supervised(rendered)
        except Corrupt as exc:
            raise SampleError(INFRASTRUCTURE, str(exc)) from exc
        if 1 not in rendered.mask:
            raise SampleError(ENVIRONMENT, f"No token of {episode.row.source} trains")
        episode.finish = types_pb2.FINISH_REASON_STOP


def conversation(row: Row, system_prompt: str = "") -> list[types_pb2.Message]:
    """The row's messages and its ``target``; raises InvalidInput when no assistant message ends it."""
    found = list(row.messages)
    if system_prompt and found[0].role != "system":
        found.insert(0, types_pb2.Message(role="system", content=system_prompt))
    target = row.fields.get("target")
    if isinstance(target, str):
        found.append(types_pb2.Message(role="assistant", content=target))
    elif target is not None:
        raise bad_row("target must be a string", row.source)
    if found[-1].role != "assistant":
        raise bad_row("supervised data needs a target, or an assistant message at its end", row.source)
    return found
