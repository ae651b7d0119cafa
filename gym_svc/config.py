"""The recipe's env section as the gym reads it.

Invariants: the recipe has been validated by then, so that keys of other services are passed over here;
classes named by dotted path are imported at Setup, never in the middle of a run.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.runtime.errors import InvalidInput

OWN_OPTIONS = ("path", "agent")


class EnvironmentConfig(BaseModel):
    """One entry of ``env.environments``; a row names it by ``environment`` or by ``agent_ref.name``.

    ``options.path`` is the class (``package.module:name``; without it the entry's name is that of a built-in
    environment, else ``single_turn``), ``options.agent`` the agent; the other options go to the class.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    verifier: str | None = None
    max_turns: int | None = Field(default=None, ge=1)
    system_prompt: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)

    @property
    def path(self) -> str | None:
        """Dotted path of the class."""
        value = self.options.get("path")
        return None if value is None else str(value)

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of the class."""
        return {key: value for key, value in self.options.items() if key not in OWN_OPTIONS}


class EnvConfig(BaseModel):
    """The section."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    default_verifier: str | None = None
    environments: dict[str, EnvironmentConfig] = Field(default_factory=dict)
    max_turns: int = Field(default=8, ge=1)
    """For multi-turn environments that set none."""
    max_total_sequence_length: int | None = Field(default=None, ge=2)
    """Tokens of a whole sequence; None leaves the limit to the engine."""
    environment_timeout_s: float = Field(default=60.0, gt=0)
    """For one reset, step or close of an environment."""
    sample_timeout_s: float | None = Field(default=None, gt=0)
    """For one attempt at one sample, reward included; None for no limit."""
    claim_timeout_s: float | None = Field(default=None, gt=0)
    """The buffer's; None beats every second."""

    @property
    def heartbeat_s(self) -> float:
        """Seconds between two heartbeats."""
        return 1.0 if self.claim_timeout_s is None else min(1.0, self.claim_timeout_s / 3)


def parse_env(text: str) -> EnvConfig:
    """Parse the JSON of the section; raises InvalidInput with the key at fault."""
    try:
        return EnvConfig.model_validate(json.loads(text or "{}"))
    except ValidationError as exc:
        first = exc.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise InvalidInput(f"env.{name}: {first['msg']}", where="env") from exc
    except ValueError as exc:
        raise InvalidInput(f"The env section is not JSON: {exc}", where="env_json") from exc
