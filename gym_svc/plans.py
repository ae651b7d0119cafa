"""Which agent, environment and verifier a row gets.

Invariants
- The row decides before its environment, the environment before the section.
- A row that names something unknown, or that nothing could verify, is refused before anything is sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

from gym_svc.agent.base import Agent
from gym_svc.agent.registry import AGENTS
from gym_svc.config import EnvConfig, EnvironmentConfig
from gym_svc.environments.base import EnvironmentFactory
from gym_svc.environments.registry import ENVIRONMENTS, environment_factory
from gym_svc.rows import Row, bad_row
from services.runtime.errors import InvalidInput

DEFAULT_ENVIRONMENT = "single_turn"


@dataclass(frozen=True, slots=True)
class Plan:
    """How one sample is played; ``verifier`` is empty for a sample without reward."""

    agent: Agent
    environment: str
    open_environment: EnvironmentFactory
    verifier: str
    max_turns: int
    system_prompt: str = ""


@dataclass(frozen=True, slots=True)
class _Entry:
    """An environment, resolved."""

    config: EnvironmentConfig
    factory: EnvironmentFactory


class Planner:
    """Resolves the env section once; raises InvalidInput for a name that does not exist."""

    def __init__(self, env: EnvConfig) -> None:
        self._env = env
        self._entries = {name: _entry(name, EnvironmentConfig()) for name in ENVIRONMENTS}
        self._entries.update({name: _entry(name, config) for name, config in env.environments.items()})

    @property
    def environments(self) -> list[str]:
        """Names of all environments."""
        return sorted(self._entries)

    def plan(self, row: Row, agent_name: str) -> Plan:
        """The plan of a sample of ``row``; raises InvalidInput that names the row."""
        name = self._environment_name(row, agent_name)
        entry = self._entries[name]
        agent = AGENTS[_agent_name(name, entry.config, agent_name, row)]
        verifier = self._verifier(row, entry.config) if agent.rewarded else ""
        return Plan(
            agent=agent,
            environment=name,
            open_environment=entry.factory,
            verifier=verifier,
            max_turns=entry.config.max_turns or self._env.max_turns,
            system_prompt=entry.config.system_prompt or "",
        )

    def _environment_name(self, row: Row, agent_name: str) -> str:
        named = row.fields.get("environment")
        if isinstance(named, str):
            if named not in self._entries:
                known = ", ".join(self.environments)
                raise bad_row(f"unknown environment {named!r}; known are {known}", row.source)
            return named
        return agent_name if agent_name in self._entries else DEFAULT_ENVIRONMENT

    def _verifier(self, row: Row, config: EnvironmentConfig) -> str:
        named = row.fields.get("verifier")
        chosen = named if isinstance(named, str) else config.verifier or self._env.default_verifier
        if not chosen:
            raise bad_row("it names no verifier, and env.default_verifier is not set", row.source)
        return chosen


def _entry(name: str, config: EnvironmentConfig) -> _Entry:
    agent = config.options.get("agent")
    if agent is not None and agent not in AGENTS:
        remedy = f"Use one of {', '.join(AGENTS)}."
        raise InvalidInput(f"Unknown agent {agent!r}", where=f"env.environments.{name}.options", do=remedy)
    target = config.path or (name if name in ENVIRONMENTS else DEFAULT_ENVIRONMENT)
    return _Entry(config, environment_factory(target, config.settings))


def _agent_name(name: str, config: EnvironmentConfig, agent_name: str, row: Row) -> str:
    if agent_name == "supervised":
        return agent_name
    chosen = config.options.get("agent")
    if chosen is not None:
        return str(chosen)
    if config.path is not None or (config.max_turns or 1) > 1:
        return "multi_turn"
    if agent_name in AGENTS:
        return agent_name
    if agent_name == name:
        return "single_turn"
    raise bad_row(f"unknown agent {agent_name!r}; known are {', '.join(AGENTS)}", row.source)
