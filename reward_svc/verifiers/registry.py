"""Verifiers by name: the built-in ones, and a user's own from ``env.verifiers``.

Invariants: names are resolved at Setup; an isolated verifier is imported in a verifier process only, so that
nothing heavy ever enters the service.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from reward_svc.config import EnvConfig, VerifierConfig
from reward_svc.plugins import load
from reward_svc.verifiers import exact_answer
from reward_svc.verifiers.base import Scorer
from services.runtime.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Verifier:
    """A verifier ready for use; exactly one of ``scorer`` (in the service) and ``path`` (isolated) is set."""

    name: str
    description: str
    time_limit_s: float
    scorer: Scorer | None = None
    path: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A verifier that comes with Headrace."""

    description: str
    scorer: Scorer | None = None
    path: str = ""


BUILT_IN: dict[str, BuiltIn] = {
    "exact_answer": BuiltIn("The final answer equals the expected one.", scorer=exact_answer.score),
    "math_verify": BuiltIn(
        "The final answer is mathematically equal to the expected one.",
        path="reward_svc.verifiers.math_verify:score",
    ),
}


def verifiers_of(env: EnvConfig, *, time_limit_s: float) -> dict[str, Verifier]:
    """All verifiers of a run by name; raises InvalidInput for one that does not exist."""
    limit = env.verifier_timeout_s or time_limit_s
    found = {name: _built_in(name, VerifierConfig(), limit) for name in BUILT_IN}
    for name, config in env.verifiers.items():
        own = config.path is not None
        found[name] = _users(name, config, limit) if own else _built_in(name, config, limit)
    for name in env.named_verifiers - set(found):
        raise unknown(name, found)
    return found


def unknown(name: str, known: Mapping[str, Any]) -> InvalidInput:
    """The error for a verifier that does not exist."""
    remedy = f"Use one of {', '.join(sorted(known))}, or add it to env.verifiers with options.path."
    return InvalidInput(f"Unknown verifier {name!r}", where="env", do=remedy)


def _built_in(name: str, config: VerifierConfig, limit: float) -> Verifier:
    known = BUILT_IN.get(name)
    if known is None:
        raise unknown(name, BUILT_IN)
    return Verifier(
        name=name, description=known.description, time_limit_s=config.timeout_s or limit,
        scorer=known.scorer, path=known.path, options=config.settings,
    )  # fmt: skip


def _users(name: str, config: VerifierConfig, limit: float) -> Verifier:
    path = config.path or ""
    isolated = config.isolated
    return Verifier(
        name=name, description=f"{path} (from the recipe)", time_limit_s=config.timeout_s or limit,
        scorer=None if isolated else load(path), path=path if isolated else "", options=config.settings,
    )  # fmt: skip
