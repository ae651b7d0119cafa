"""The agent of single-turn tasks: one prompt, one answer."""

from __future__ import annotations

from gym_svc.agent.base import Episode
from gym_svc.agent.multi_turn import first_messages


class SingleTurn:
    """One turn, then the reward."""

    rewarded = True

    async def run(self, episode: Episode) -> None:
        """See :class:`gym_svc.agent.base.Agent`."""
        environment = episode.open_environment()
        try:
            await episode.turn(await first_messages(episode, environment))
        finally:
            await episode.close(environment)
