"""The built-in agents by name."""

from __future__ import annotations

from gym_svc.agent.base import Agent
from gym_svc.agent.multi_turn import MultiTurn
from gym_svc.agent.single_turn import SingleTurn
from gym_svc.agent.supervised import Supervised

AGENTS: dict[str, Agent] = {
    "single_turn": SingleTurn(),
    "multi_turn": MultiTurn(),
    "supervised": Supervised(),
}
