"""Optimizer and learning-rate schedule, by the names that recipes use.

Invariants
- Only the classes in the tables below can be named: a recipe never imports code.
- The schedule advances once for each RL step, however many optimizer steps that has (as in NeMo RL).
- State consists of tensors and primitive values only, so that it loads with ``weights_only=True``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from services.runtime.errors import InvalidInput
from trainer_svc.config import OptimConfig

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "SGD": torch.optim.SGD,
}
SCHEDULERS: dict[str, type[LRScheduler]] = {
    "LinearLR": lr_scheduler.LinearLR,
    "ConstantLR": lr_scheduler.ConstantLR,
    "CosineAnnealingLR": lr_scheduler.CosineAnnealingLR,
    "ExponentialLR": lr_scheduler.ExponentialLR,
    "PolynomialLR": lr_scheduler.PolynomialLR,
}


def build_optimizer(parameters: Iterable[torch.nn.Parameter], config: OptimConfig) -> torch.optim.Optimizer:
    """The recipe's optimizer over ``parameters`` (FP32 masters); raises InvalidInput on name or kwargs."""
    kind = _known(config.name, OPTIMIZERS, "torch.optim", "policy.optimizer.name")
    kwargs = dict(config.kwargs)
    if isinstance(kwargs.get("betas"), list):
        kwargs["betas"] = tuple(kwargs["betas"])
    optimizer: torch.optim.Optimizer = _make("policy.optimizer.kwargs", kind, list(parameters), kwargs)
    return optimizer


def build_scheduler(optimizer: torch.optim.Optimizer, config: OptimConfig) -> LRScheduler | None:
    """The recipe's schedule; None is a constant learning rate."""
    built = [_scheduler(optimizer, name, kwargs) for name, kwargs in config.schedulers]
    if len(built) < 2:
        return built[0] if built else None
    return lr_scheduler.SequentialLR(optimizer, built, milestones=list(config.milestones))


def learning_rate(optimizer: torch.optim.Optimizer) -> float:
    """The rate of the next optimizer step."""
    return float(optimizer.param_groups[0]["lr"])


def _scheduler(optimizer: torch.optim.Optimizer, name: str, kwargs: Mapping[str, Any]) -> LRScheduler:
    kind = _known(name, SCHEDULERS, "torch.optim.lr_scheduler", "policy.scheduler.name")
    scheduler: LRScheduler = _make("policy.scheduler.kwargs", kind, optimizer, dict(kwargs))
    return scheduler


def _known(name: str, table: Mapping[str, Any], package: str, key: str) -> Any:
    short = name.removeprefix(package + ".")
    if short not in table:
        known = ", ".join(f"{package}.{each}" for each in table)
        raise InvalidInput(f"{key}: {name} is not known", where="recipe", do=f"Use one of {known}.")
    return table[short]


def _make(key: str, kind: Any, first: Any, kwargs: dict[str, Any]) -> Any:
    try:
        return kind(first, **kwargs)
    except (TypeError, ValueError) as exc:
        raise InvalidInput(f"{key}: {exc}", where="recipe") from exc
