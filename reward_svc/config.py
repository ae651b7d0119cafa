"""The recipe's env section as the reward service reads it.

Invariant: the recipe has been validated by then; keys of other services are passed over.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.runtime.errors import InvalidInput

OWN_OPTIONS = ("path", "isolated")


class RewardScaling(BaseModel):
    """Maps [source_min, source_max] linearly to [target_min, target_max], clamping outside."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    enabled: bool = False
    source_min: float = 0.0
    source_max: float = 1.0
    target_min: float = 0.0
    target_max: float = 1.0


class VerifierConfig(BaseModel):
    """One entry of ``env.verifiers``.

    ``options.path`` makes it a verifier of the user's own (``package.module:name``), isolated in a killable
    process unless ``options.isolated`` is false; the other options are handed to the verifier.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    timeout_s: float | None = Field(default=None, gt=0)
    options: dict[str, Any] = Field(default_factory=dict)

    @property
    def path(self) -> str | None:
        """Dotted path of the callable."""
        value = self.options.get("path")
        return None if value is None else str(value)

    @property
    def isolated(self) -> bool:
        """Whether a user's verifier runs in a process of its own."""
        return bool(self.options.get("isolated", True))

    @property
    def settings(self) -> dict[str, Any]:
        """What the verifier sees as ``item.options``."""
        return {key: value for key, value in self.options.items() if key not in OWN_OPTIONS}


class EnvironmentConfig(BaseModel):
    """One entry of ``env.environments``, of which only the verifier matters here."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    verifier: str | None = None


class EnvConfig(BaseModel):
    """The section."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    default_verifier: str | None = None
    environments: dict[str, EnvironmentConfig] = Field(default_factory=dict)
    verifiers: dict[str, VerifierConfig] = Field(default_factory=dict)
    verifier_timeout_s: float | None = Field(default=None, gt=0)
    reward_scaling: RewardScaling = RewardScaling()

    @property
    def named_verifiers(self) -> set[str]:
        """Verifiers that the section itself names."""
        named = {self.default_verifier, *(entry.verifier for entry in self.environments.values())}
        return {name for name in named if name} | set(self.verifiers)


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
