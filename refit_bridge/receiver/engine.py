"""vLLM's weight-transfer interface, implemented for our transports (backend ``headrace``).

Invariants
- A tensor is used only after its checksum was compared with the sender's; a wrong one is refused by name.
- An update belongs to one generation; data of another is refused.
- After a failure the model is whole again (old or mixed weights, never the meta device), so that the next
  full cycle can start; that it must not serve meanwhile is the bridge's business.
- ``report`` describes the last finished update only.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from refit_bridge import faults
from refit_bridge.checksum import checksum
from refit_bridge.plan import TensorSpec, dtype_number
from refit_bridge.receiver import compat, cpu_faults, image
from refit_bridge.transports import shm
from services.runtime.errors import Corrupt, Fenced, InvalidInput, Refused


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing has to be agreed on before a transfer."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One chunk: tensors in a shared file.

    ``slices``: dicts of name, dtype, shape, offset (bytes), nbytes and checksum (64 bits).
    """

    generation: int
    shm_name: str
    slices: list[dict[str, Any]]


@dataclass
class _Update:
    """The update in progress. ``sources`` are views of the shared file by checkpoint name."""

    generation: int
    plan: tuple[TensorSpec, ...]
    sources: dict[str, Tensor] = field(default_factory=dict)
    stale: list[str] = field(default_factory=list)
    files: dict[str, Tensor] = field(default_factory=dict)


class HeadraceWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Receives one version: begin, start, update (one or more), finish."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._update: _Update | None = None
        self.report: image.Report | None = None

    def begin(self, generation: int, plan: Sequence[TensorSpec]) -> None:
        """Announce an update; abandons an unfinished older one. Raises Fenced for an older generation."""
        if self._update is not None and generation < self._update.generation:
            raise Fenced(f"Generation {generation} is older than {self._update.generation}", where="engine")
        self.abandon()
        self._update = _Update(generation, tuple(plan))
        self.report = None

    def abandon(self) -> None:
        """Leave an unfinished update: the model is whole afterwards, its weights old or mixed."""
        with compat.current_config(self.vllm_config):
            compat.abandon_reload(self.model, self.model_config)
        if self._update is not None:
            self._update.sources.clear()
            self._update.files.clear()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Prepare the layers for new weights."""
        self._current()
        with compat.current_config(self.vllm_config):
            compat.abandon_reload(self.model, self.model_config)
            cpu_faults.reset_expert_kernels(self.model)
            compat.begin_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive one chunk; on failure the update is abandoned and the error names the tensor."""
        # The base method ends in torch.accelerator.synchronize(), which a CPU-only torch does not have.
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            self.abandon()
            raise
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Check and load the tensors of one chunk."""
        update = self._current()
        if update_info.generation != update.generation:
            raise Fenced(
                f"Data of generation {update_info.generation} during {update.generation}", where="engine"
            )
        update.stale = faults.active("stale", _number(update_info.shm_name))
        read = list(self._read(update, update_info))
        update.sources.update(read)
        wanted = [(name, t.to(self.device)) for name, t in read if not _is_stale(name, update.stale)]
        with compat.current_config(self.vllm_config):
            self.model.load_weights(wanted)

    def finish_weight_update(self) -> None:
        """Finalise the layers and ask every tensor for its image; the result is in ``report``."""
        update = self._current()
        with compat.current_config(self.vllm_config):
            compat.end_reload(self.model, self.model_config)
            if not update.stale:
                cpu_faults.repack_tied_heads(self.model)
            names = [spec.name for spec in update.plan]
            self.report = image.check(self.model, update.sources, names, device=self.device)
        update.sources.clear()
        update.files.clear()

    def shutdown(self) -> None:
        """Drop the mappings of an unfinished update."""
        if self._update is not None:
            self._update.sources.clear()
            self._update.files.clear()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[tuple[str, Tensor]], trainer_args: Any) -> None:
        """Abstract in vLLM 0.26, gone later; our sender is :class:`refit_bridge.sender.ShmSender`."""
        raise NotImplementedError("the trainer stages weights with refit_bridge.sender")

    def _current(self) -> _Update:
        if self._update is None:
            raise Refused(
                "No weight update has begun", where="engine", do="Call headrace_begin_update first."
            )
        return self._update

    def _read(self, update: _Update, info: UpdateInfo) -> Iterator[tuple[str, Tensor]]:
        planned = {spec.name: spec for spec in update.plan}
        if info.shm_name not in update.files:
            update.files[info.shm_name] = _map(info.shm_name)
        memory = update.files[info.shm_name]
        for entry in info.slices:
            spec = TensorSpec(str(entry["name"]), str(entry["dtype"]), tuple(int(n) for n in entry["shape"]))
            if planned and planned.get(spec.name) != spec:
                raise Refused(f"Tensor {spec.name} is not in the plan as it came", reason="PLAN_MISMATCH")
            yield spec.name, _view(memory, spec, entry)


def _map(name: str) -> Tensor:
    """The file's bytes, mapped copy-on-write: what is done to them here never reaches another reader."""
    descriptor = shm.open_existing(name)
    try:
        memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _view(memory: Tensor, spec: TensorSpec, entry: dict[str, Any]) -> Tensor:
    offset, nbytes = int(entry["offset"]), int(entry["nbytes"])
    dtype_number(spec.dtype)
    if nbytes != spec.nbytes or offset < 0 or offset + nbytes > len(memory):
        raise InvalidInput(
            f"Tensor {spec.name} does not fit its slice of {nbytes} bytes", where="weight file"
        )
    raw = memory[offset : offset + nbytes]
    found = checksum(raw.numpy())
    if found != int(entry["checksum"]):
        raise Corrupt(
            f"Tensor {spec.name} arrived damaged: checksum {found:016x}, sent {int(entry['checksum']):016x}",
            where="weight file",
            do="Publish the version again.",
            tensor=spec.name,
        )
    return raw.view(getattr(torch, spec.dtype)).view(spec.shape)


def _number(shm_name: str) -> int:
    match = re.search(r"-(\d+)-[0-9a-f]+$", shm_name)
    return int(match.group(1)) if match else 0


def _is_stale(name: str, modules: Sequence[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)
