"""Where weights come from: a named stream of tensors in checkpoint names.

Invariants
- Names and shapes are those of the model's checkpoint on disk (what an engine loads), not those in memory.
- Persistent buffers are weights too (a router's correction bias trains); they keep their own dtype.
- A tied tensor is sent once, under its first name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """One tensor of a source. ``castable`` is True when it travels in the wire dtype."""

    name: str
    tensor: Tensor
    castable: bool


class WeightSource(Protocol):
    """Iterates a model's weights; each pass yields the same names in the same order."""

    def __iter__(self) -> Iterator[NamedTensor]:
        """Yield every tensor once."""
        ...


class TensorSource:
    """A source over a plain mapping from checkpoint names to tensors; all floating tensors are castable."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __iter__(self) -> Iterator[NamedTensor]:
        for name, tensor in self._tensors.items():
            yield NamedTensor(name, tensor, tensor.is_floating_point())


class HuggingFaceSource:
    """A source over a transformers model, whose layout in memory is turned back into its checkpoint's."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __iter__(self) -> Iterator[NamedTensor]:
        buffers = {name for name, _ in self._model.named_buffers()}
        with torch.no_grad():
            for name, tensor in checkpoint_tensors(self._model).items():
                yield NamedTensor(name, tensor, tensor.is_floating_point() and name not in buffers)


def checkpoint_tensors(model: Any) -> Mapping[str, Tensor]:
    """The state dict under checkpoint names and shapes (experts apart, prefixes as on disk), each once."""
    from transformers.core_model_loading import revert_weight_conversion

    # Before the conversion, which sorts by name and would put a tied lm_head before its embedding.
    tied = second_names(model)
    state = {name: _whole(tensor) for name, tensor in model.state_dict().items() if name not in tied}
    reverted: Mapping[str, Tensor] = revert_weight_conversion(model, state)
    return reverted


def _whole(tensor: Tensor) -> Tensor:
    full = getattr(tensor, "full_tensor", None)
    gathered: Tensor = full() if callable(full) else tensor
    return gathered.detach()


def second_names(model: Any) -> set[str]:
    """Names of parameters that are known under another name: a tied lm_head is the embedding."""
    declared = set(getattr(model, "all_tied_weights_keys", None) or ())
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    second: set[str] = set()
    for names in groups.values():
        # The model says which of the names is the copy; without that it is the later one.
        second.update(sorted(names, key=lambda name: name in declared)[1:])
    return second
