"""Asks a reloaded model for the image of every tensor: module(x) against source · x.

Loading without an error proves little: an engine keeps packed copies, fused layouts and captured pointers,
and any of them can go stale in silence. So each module *answers* and its answer is compared with what the
source says. On the CPU this is the only way: packed weights no longer exist as parameters.

Invariants
- A failure is named by the source's checkpoint name (or, where the engine has a copy of its own, by that).
- What cannot be checked is listed as unchecked, never counted as checked.
- Inputs are fixed pseudo-random rows and unit vectors: unit vectors give back columns exactly, so that the
  small change of one training step is seen; random rows see everything, within rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from refit_bridge.receiver import compat, expert_image
from refit_bridge.receiver.probes import EXACT, ROUNDED, probe_rows


@dataclass
class Report:
    """``failures`` and ``unchecked`` give the reason by name; ``names`` are all that were checked."""

    names: set[str] = field(default_factory=set)
    failures: dict[str, str] = field(default_factory=dict)
    unchecked: dict[str, str] = field(default_factory=dict)

    @property
    def checked(self) -> int:
        """How many tensors answered, rightly or wrongly."""
        return len(self.names)

    def ok(self, name: str) -> None:
        """Count ``name`` as checked."""
        self.names.add(name)

    def fail(self, name: str, detail: str) -> None:
        """Record a failure; the first detail of a name is kept."""
        self.names.add(name)
        self.failures.setdefault(name, detail)

    def skip(self, name: str, why: str) -> None:
        """Record that ``name`` cannot be checked."""
        self.unchecked.setdefault(name, why)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the wire."""
        return {
            "checked": self.checked,
            "failures": [{"name": name, "detail": text} for name, text in self.failures.items()],
            "unchecked": [{"name": name, "detail": text} for name, text in self.unchecked.items()],
        }


class Sources:
    """What was sent, found by the engine's names; ``name`` gives the checkpoint's back."""

    def __init__(self, model: Any, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self._device = device
        self._names = {new: old for old, new in compat.engine_names(model, tensors).items()}
        self._tensors = tensors
        self._packed = compat.packed_modules(model)

    def __contains__(self, engine_name: str) -> bool:
        return engine_name in self._names

    def name(self, engine_name: str) -> str:
        """The checkpoint's name; the engine's own where nothing was sent under it."""
        return self._names.get(engine_name, engine_name)

    def tensor(self, engine_name: str, dtype: torch.dtype) -> Tensor:
        """The source on the device, in the type that the engine keeps it in."""
        return self._tensors[self._names[engine_name]].to(device=self._device, dtype=dtype)

    def parts(self, module_name: str, suffix: str) -> list[str]:
        """Engine names of the sources behind ``module_name``'s parameter ``suffix``, in packed order."""
        prefix, _, last = module_name.rpartition(".")
        modules = self._packed.get(last, [last]) if f"{module_name}.{suffix}" not in self._names else [last]
        return [f"{prefix}.{part}.{suffix}" if prefix else f"{part}.{suffix}" for part in modules]


def check(model: Any, tensors: Mapping[str, Tensor], plan: Sequence[str], *, device: torch.device) -> Report:
    """Compare every module's answer with ``tensors`` (by checkpoint name); ``plan`` is what had to come."""
    report = Report()
    for name in plan:
        if name not in tensors:
            report.fail(name, "never arrived")
    sources = Sources(model, tensors, device)
    with torch.no_grad():
        for name, module in model.named_modules():
            _check_module(model, name, module, sources, report)
        for name, module in compat.expert_modules(model):
            expert_image.check(name, module, sources, report)
    for name in tensors:
        if name not in report.names:
            report.skip(name, "no module of the engine is known to answer for it")
    return report


def _check_module(model: Any, name: str, module: Any, sources: Sources, report: Report) -> None:
    if hasattr(module, "w13_weight"):
        return
    for suffix, parameter in list(module.named_parameters(recurse=False)):
        _check_value(name, module, suffix, parameter, sources, report)
    for suffix, buffer in list(module.named_buffers(recurse=False)):
        if f"{name}.{suffix}" in sources:
            _check_value(name, module, suffix, buffer, sources, report)
    if isinstance(module, LinearBase | ParallelLMHead):
        _check_product(model, name, module, sources, report)


def _check_value(name: str, module: Any, suffix: str, held: Tensor, sources: Sources, report: Report) -> None:
    parts = sources.parts(name, suffix)
    known = isinstance(module, LinearBase | VocabParallelEmbedding) or compat.is_default_loader(held)
    if not held.numel() or not known or not all(part in sources for part in parts):
        return
    # Some CPU kernels keep a bias in float32: what must be equal is the value in the source's rounding.
    start = 0
    for part in parts:
        source = sources.tensor(part, held.dtype)
        here = held[start : start + len(source)] if held.dim() else held
        start += len(source) if held.dim() else 0
        if here.shape != source.shape:
            report.skip(sources.name(part), f"the engine keeps it as {list(held.shape)}")
        elif torch.equal(here, source):
            report.ok(sources.name(part))
        else:
            report.fail(sources.name(part), f"the engine's {name}.{suffix} differs {_most(here, source)}")


def _check_product(model: Any, name: str, module: Any, sources: Sources, report: Report) -> None:
    parts = sources.parts(name, "weight")
    if isinstance(module, ParallelLMHead) and parts[0] not in sources:
        tied = _tied_source(model, module, sources)
        if tied is not None:
            _compare_product(name, module, [(f"{name}.weight", tied)], sources, report)
            return
    missing = [part for part in parts if part not in sources]
    for part in missing:
        report.fail(part, f"nothing was sent for the engine's {name}")
    if not missing:
        _compare_product(name, module, [(sources.name(part), part) for part in parts], sources, report)


def _compare_product(
    name: str, module: Any, parts: list[tuple[str, str]], sources: Sources, report: Report
) -> None:
    dtype = getattr(module, "params_dtype", None) or next(module.parameters()).dtype
    weights = [sources.tensor(part, dtype) for _, part in parts]
    if any(weight.dim() != 2 for weight in weights) or getattr(module, "tp_size", 1) != 1:
        for label, _ in parts:
            report.skip(label, "only whole two-dimensional weights are compared")
        return
    x, columns = probe_rows(weights[0].shape[1], dtype, weights[0].device)
    try:
        answer = compat.apply_linear(module, x).float()
    except compat.RUNTIME_FAULTS as exc:
        for label, _ in parts:
            report.fail(label, f"{name} does not answer: {exc}")
        return
    start = 0
    for (label, _), weight in zip(parts, weights, strict=True):
        problem = _product_problem(answer[:, start : start + len(weight)], weight, x, columns)
        start += len(weight)
        if problem:
            report.fail(label, f"the engine's {name} {problem}")
        else:
            report.ok(label)


def _product_problem(answer: Tensor, weight: Tensor, x: Tensor, columns: Tensor) -> str:
    if answer.shape[1] != len(weight):
        return f"answers with {answer.shape[1]} rows, the source has {len(weight)}"
    wide = weight.float()
    unit, rest = answer[: len(columns)], answer[len(columns) :]
    exact = wide[:, columns].T
    off = (unit - exact).abs() > EXACT[weight.dtype] * exact.abs() + 1e-30
    if off.any():
        return f"answers with other weights {_most(unit, exact)} ({int(off.sum())} of {off.numel()} sampled)"
    expected = x[len(columns) :].float() @ wide.T
    scale = wide.norm(dim=1).clamp_min(1e-30)
    worst = ((rest - expected).abs() / scale).max().item()
    # A comparison that NaN fails too.
    return "" if worst <= ROUNDED[weight.dtype] else f"is off by {worst:.1e} of its row norm"


def _tied_source(model: Any, head: Any, sources: Sources) -> str | None:
    """The engine name of the embedding whose weight this head shares, if it was sent."""
    for name, module in model.named_modules():
        if isinstance(module, VocabParallelEmbedding) and module is not head and module.weight is head.weight:
            return f"{name}.weight" if f"{name}.weight" in sources else None
    return None


def _most(here: Tensor, source: Tensor) -> str:
    return f"by up to {(here.float() - source.float()).abs().max().item():.3g}"
