"""The image check of stacked experts: every expert answers a few rows by itself.

Invariant: an expert's three projections are fused, so a wrong answer names all three.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from refit_bridge.receiver import compat
from refit_bridge.receiver.probes import EXPERT, random_rows

ROWS = 4
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


class _Sources(Protocol):
    def __contains__(self, engine_name: str) -> bool: ...

    def name(self, engine_name: str) -> str: ...

    def tensor(self, engine_name: str, dtype: torch.dtype) -> Tensor: ...


class _Report(Protocol):
    def ok(self, name: str) -> None: ...

    def fail(self, name: str, detail: str) -> None: ...

    def skip(self, name: str, why: str) -> None: ...


def check(name: str, module: Any, sources: _Sources, report: _Report) -> None:
    """Compare each expert of ``module`` with its sources ``name.<i>.<projection>.weight``."""
    experts = [_names(name, module, i) for i in range(_count(module))]
    missing = [part for names in experts for part in names if part not in sources]
    for part in missing:
        report.fail(sources.name(part), f"nothing was sent for the engine's {name}")
    activation = _ACTIVATIONS.get(_activation_name(module))
    reason = _cannot(module, activation)
    if reason or missing or activation is None:
        for part in (part for names in experts for part in names if part in sources):
            report.skip(sources.name(part), reason or "other experts of the layer are missing")
        return
    try:
        answers = _answers(module, len(experts))
    except compat.RUNTIME_FAULTS as exc:
        for part in (part for names in experts for part in names):
            report.skip(sources.name(part), f"the experts cannot be asked: {exc}")
        return
    for names, answer in zip(experts, answers, strict=True):
        _compare(names, answer, activation, sources, report)


def _compare(
    names: tuple[str, str, str],
    answer: Tensor,
    activation: Callable[[Tensor], Tensor],
    sources: _Sources,
    report: _Report,
) -> None:
    gate, up, down = (sources.tensor(part, answer.dtype).float() for part in names)
    x = random_rows(ROWS, gate.shape[1], answer.dtype, answer.device).float()
    expected = (activation(x @ gate.T) * (x @ up.T)) @ down.T
    scale = expected.pow(2).mean(dim=1, keepdim=True).sqrt().clamp_min(1e-30)
    worst = ((answer.float() - expected).abs() / scale).max().item()
    for part in names:
        if worst <= EXPERT[answer.dtype]:
            report.ok(sources.name(part))
        else:
            report.fail(sources.name(part), f"its expert's answer is off by {worst:.1e} of its size")


def _answers(module: Any, count: int) -> list[Tensor]:
    width = int(module.hidden_size)
    dtype, device = module.w13_weight.dtype, module.w13_weight.device
    x = random_rows(ROWS, width, dtype, device)
    expert = torch.arange(count, device=device).repeat_interleave(ROWS)
    answer = compat.apply_experts(module, x.repeat(count, 1), expert)
    return list(answer.view(count, ROWS, width).unbind(0))


def _names(name: str, module: Any, index: int) -> tuple[str, str, str]:
    gate = getattr(module, "ckpt_gate_proj_name", "gate_proj")
    up = getattr(module, "ckpt_up_proj_name", "up_proj")
    down = getattr(module, "ckpt_down_proj_name", "down_proj")
    return (f"{name}.{index}.{gate}.weight", f"{name}.{index}.{up}.weight", f"{name}.{index}.{down}.weight")


def _count(module: Any) -> int:
    return int(getattr(module, "global_num_experts", len(module.w13_weight)))


def _activation_name(module: Any) -> str:
    activation = getattr(module, "activation", "")
    return str(getattr(activation, "value", activation))


def _cannot(module: Any, activation: object) -> str:
    if activation is None:
        return f"the activation {_activation_name(module)!r} is not known here"
    if hasattr(module, "w13_bias"):
        return "experts with a bias are not compared"
    if _count(module) != int(getattr(module, "local_num_experts", _count(module))):
        return "experts are spread over several workers"
    return ""
