"""Work-arounds for two faults of vLLM's CPU build that leave old weights in use after a reload, in silence.

Invariants: both do nothing on another device; both are idempotent. The image check finds each fault by the
name of the tensor when its work-around is missing.
"""

from __future__ import annotations

from typing import Any


def reset_expert_kernels(model: Any) -> int:
    """Before a reload: make unquantised experts pack their weights again.

    The CPU kernel wants expert weights in a packed layout. ``UnquantizedFusedMoEMethod`` packs them only
    while ``moe_kernel`` is None; on a reload it copies *unpacked* weights over the packed storage, and the
    kernel reads them as if they were packed. Dropping the kernel makes vLLM build it, and pack, anew.
    Returns how many were reset.
    """
    count = 0
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None and _on_cpu(module):
            method.moe_kernel = None
            count += 1
    return count


def repack_tied_heads(model: Any) -> int:
    """After a reload: rebuild packed copies that no tensor of the stream belongs to.

    With tied embeddings ``lm_head`` is a module of its own that shares the embedding's parameter but owns a
    packed *copy* of it (``cpu_linear``). No ``lm_head.weight`` arrives, so vLLM leaves that copy as it was.
    Modules whose weight is still there (others gave theirs up when it was packed) are packed again.
    Returns how many were rebuilt.
    """
    count = 0
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not hasattr(module, "cpu_linear") or weight is None or not weight.numel() or not _on_cpu(module):
            continue
        method: Any = getattr(module, "quant_method", None)
        if hasattr(method, "process_weights_after_loading"):
            method.process_weights_after_loading(module)
            count += 1
    return count


def _on_cpu(module: Any) -> bool:
    return all(parameter.device.type == "cpu" for parameter in module.parameters(recurse=False))
