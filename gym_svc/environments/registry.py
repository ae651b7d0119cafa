"""Environments by name: registered ones, and a user's own by ``package.module:name``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from gym_svc import plugins
from gym_svc.environments.base import EnvironmentFactory
from gym_svc.environments.single_turn import SingleTurn
from services.runtime.errors import InvalidInput

ENVIRONMENTS: dict[str, Any] = {"single_turn": SingleTurn}


def environment_factory(name: str, settings: Mapping[str, Any]) -> EnvironmentFactory:
    """What opens an episode of environment ``name``; raises InvalidInput for an unknown one."""
    if plugins.is_path(name):
        return partial(plugins.load(name, "environment"), **settings)
    if name not in ENVIRONMENTS:
        known = ", ".join(sorted(ENVIRONMENTS))
        raise InvalidInput(
            f"Unknown environment {name!r}", where="env", do=f"Use {known}, or package.module:name."
        )
    return partial(ENVIRONMENTS[name], **settings)
