"""What differs between the vLLM versions we run on (0.26 to 0.32), and what vLLM keeps private.

Invariant: no other file of the receiver touches a private name of vLLM or asks for its version.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

RUNTIME_FAULTS = (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError, AssertionError)


def current_config(vllm_config: Any) -> Any:
    """Context in which model code finds its configuration (0.26 does not set it around weight updates)."""
    return set_current_vllm_config(vllm_config)


def begin_reload(model: Any) -> None:
    """Put the layers into vLLM's layer-by-layer reload (parameters go to the meta device)."""
    initialize_layerwise_reload(model)


def end_reload(model: Any, model_config: Any) -> None:
    """Finish the layers that have all their weights and bring back the others as they were."""
    finalize_layerwise_reload(model, model_config)


def abandon_reload(model: Any, model_config: Any) -> None:
    """Undo an unfinished reload: forget what was buffered, put the old tensors back.

    Without it the counters of the abandoned attempt would let the next one finish a layer too early, and a
    request would meet parameters on the meta device and kill the engine.
    """
    unfinished = False
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            unfinished = True
            info.loaded_weights.clear()
            info.load_numel = 0
    if unfinished:
        finalize_layerwise_reload(model, model_config)


def engine_names(model: Any, names: Iterable[str]) -> dict[str, str]:
    """The engine's name of each checkpoint name (prefix changes only; packed parts keep their own names).

    Names that the model leaves out on purpose are absent.
    """
    mapper = _rename_mapper(model)
    if mapper is None:
        return {name: name for name in names}
    translate = getattr(mapper, "map_name", None) or mapper._map_name  # noqa: SLF001
    found = {name: translate(name) for name in names}
    return {name: new for name, new in found.items() if new is not None}


def _rename_mapper(model: Any) -> Any:
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    rename = getattr(mapper, "get_rename_mapper", None)
    return rename() if callable(rename) else mapper


def packed_modules(model: Any) -> dict[str, list[str]]:
    """Which source modules each fused module holds, such as qkv_proj: [q_proj, k_proj, v_proj]."""
    found: dict[str, list[str]] = {}
    for module in model.modules():
        mapping = getattr(module, "packed_modules_mapping", None)
        if isinstance(mapping, Mapping):
            found.update({name: list(parts) for name, parts in mapping.items()})
    return found


def is_default_loader(parameter: Tensor) -> bool:
    """Whether the parameter is loaded by a plain copy, so that its value must equal the source's."""
    loader: Any = getattr(parameter, "weight_loader", None)
    while hasattr(loader, "__wrapped__"):
        loader = loader.__wrapped__
    return loader is None or getattr(loader, "__name__", "") == "default_weight_loader"


def apply_linear(module: Any, x: Tensor) -> Tensor:
    """The module's own product with ``x`` [rows, in], without bias."""
    result: Tensor = module.quant_method.apply(module, x, None)
    return result


def apply_experts(module: Any, x: Tensor, expert: Tensor) -> Tensor:
    """Each row of ``x`` [rows, hidden] through the one expert that ``expert`` [rows] names, with weight 1."""
    method = module.quant_method
    if getattr(method, "is_monolithic", False):
        raise NotImplementedError("the kernel does its own routing")
    kind = getattr(method, "topk_indices_dtype", None) or torch.int32
    given = {
        "layer": module,
        "x": x,
        "topk_weights": torch.ones(len(x), 1, dtype=torch.float32, device=x.device),
        "topk_ids": expert.to(kind).unsqueeze(1),
        "shared_experts": None,
        "shared_experts_input": None,
    }
    known = inspect.signature(method.apply).parameters
    if "topk_ids" not in known:
        raise NotImplementedError("this vLLM routes inside the expert kernel")
    result: Tensor = method.apply(**{key: value for key, value in given.items() if key in known})
    return result


def expert_modules(model: Any) -> Iterator[tuple[str, Any]]:
    """Modules that hold stacked experts, with the name below which the checkpoint numbers them."""
    for name, module in model.named_modules():
        if hasattr(module, "w13_weight") and hasattr(module, "w2_weight"):
            yield name.removesuffix(".routed_experts"), module
