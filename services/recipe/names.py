"""What rows may name: the built-in agents, environments and verifiers, and those of the recipe's env section.

Invariant: the tables say what the gym and the reward service have (a contract test compares them), so that a
wrong name is met before anything starts.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection

from services.recipe.surroundings import Env, Environment

AGENTS = ("single_turn", "multi_turn", "supervised")
ENVIRONMENTS = ("single_turn",)
VERIFIERS = ("exact_answer", "math_verify")


def verifiers(env: Env) -> set[str]:
    """Names of all verifiers of a run."""
    return {*VERIFIERS, *env.verifiers}


def environments(env: Env) -> set[str]:
    """Names of all environments of a run."""
    return {*ENVIRONMENTS, *env.environments}


def agents(env: Env) -> set[str]:
    """What ``agent_ref.name`` may be: an agent, or an environment, which then chooses its agent."""
    return {*AGENTS, *environments(env)}


def chooses_agent(environment: Environment | None) -> bool:
    """Whether an environment decides who drives its rows, whatever they say."""
    if environment is None:
        return False
    options = environment.options
    return "agent" in options or "path" in options or (environment.max_turns or 1) > 1


def remedy(name: str, known: Collection[str]) -> str:
    """What to do about the unknown ``name``: the nearest known one, else all of them."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"Did you mean {near[0]}?" if near else f"Known are {', '.join(sorted(known))}."
