"""Stages a version's weights in shared memory, once, with a checksum per tensor.

Invariants
- A staged file is never rewritten: engines may hold views of it until their update has finished.
- Staging a version again returns the first description, whatever the weights are by then.
- At most ``KEEP`` versions are held (the committed one and its successor); older files are deleted.
- The digest covers names, shapes, dtypes and checksums of what engines are meant to get.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from protos.headrace.v1 import rollout_pb2, trainer_pb2, types_pb2
from refit_bridge import faults
from refit_bridge.checksum import checksum
from refit_bridge.plan import TensorSpec, check_unique, chunks_by_bytes, plan_hash, version_digest
from refit_bridge.sender.source import NamedTensor, WeightSource
from refit_bridge.transports import shm
from services.runtime.errors import InvalidInput

CHUNK_BYTES = 256 * 1024 * 1024
KEEP = 2


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """What one staged version is and where it lies."""

    incarnation: int
    number: int
    digest: str
    plan: tuple[TensorSpec, ...]
    plan_hash: str
    shm_name: str
    chunks: tuple[tuple[rollout_pb2.TensorSlice, ...], ...]
    nbytes: int
    seconds: float

    def response(self) -> trainer_pb2.StageWeightsResponse:
        """The answer of ``Trainer.StageWeights``."""
        return trainer_pb2.StageWeightsResponse(
            version=types_pb2.PolicyVersion(
                incarnation=self.incarnation, number=self.number, digest=self.digest
            ),
            plan=[spec.to_proto() for spec in self.plan],
            plan_hash=self.plan_hash,
            shm_name=self.shm_name,
            chunks=[trainer_pb2.WeightChunk(slices=chunk) for chunk in self.chunks],
            nbytes=self.nbytes,
            seconds=self.seconds,
        )


class ShmSender:
    """Holds the staged versions of one run. Not thread-safe: one thread drives it."""

    def __init__(self, run: str, *, chunk_bytes: int = CHUNK_BYTES, root: Path = shm.ROOT) -> None:
        self._run = run
        self._chunk_bytes = chunk_bytes
        self._root = root
        self._staged: dict[tuple[int, int], StagedWeights] = {}
        self._owned: dict[str, int] = {}
        """Descriptors whose locks say that the files have a living owner."""
        shm.sweep(run, root=root)

    def stage(
        self, incarnation: int, number: int, source: WeightSource, wire_dtype: torch.dtype
    ) -> StagedWeights:
        """Write the source's tensors as version (incarnation, number) and describe them.

        ``wire_dtype`` is what castable tensors travel in. Raises Exhausted when shared memory is full.
        """
        known = self._staged.get((incarnation, number))
        if known is not None:
            return known
        while len(self._staged) >= KEEP:
            self.release(*next(iter(self._staged)))
        staged = self._write(incarnation, number, source, wire_dtype)
        self._staged[incarnation, number] = staged
        return staged

    def get(self, incarnation: int, number: int) -> StagedWeights | None:
        """The description of a version that is held."""
        return self._staged.get((incarnation, number))

    def release(self, incarnation: int, number: int) -> bool:
        """Give a version's memory back; False when it was not held."""
        staged = self._staged.pop((incarnation, number), None)
        return staged is not None and self._remove(staged.shm_name)

    def close(self) -> None:
        """Release everything; idempotent."""
        for incarnation, number in list(self._staged):
            self.release(incarnation, number)

    def _write(
        self, incarnation: int, number: int, source: WeightSource, wire_dtype: torch.dtype
    ) -> StagedWeights:
        started = time.monotonic()
        tensors = _without_omitted(list(source), number)
        plan = [_spec(named, wire_dtype) for named in tensors]
        check_unique(plan, where="weight source")
        slices, nbytes = shm.layout(plan)
        name = shm.new_name(self._run, incarnation, number)
        sums = self._fill(name, nbytes, tensors, plan, slices, number)
        return StagedWeights(
            incarnation=incarnation,
            number=number,
            digest=version_digest(plan, sums),
            plan=tuple(plan),
            plan_hash=plan_hash(plan),
            shm_name=name,
            chunks=_chunks(plan, slices, sums, self._chunk_bytes),
            nbytes=sum(spec.nbytes for spec in plan),
            seconds=time.monotonic() - started,
        )

    def _fill(
        self,
        name: str,
        nbytes: int,
        tensors: Sequence[NamedTensor],
        plan: Sequence[TensorSpec],
        slices: Sequence[shm.Slice],
        number: int,
    ) -> list[int]:
        self._owned[name] = shm.create(name, nbytes, root=self._root)
        try:
            memory = mmap.mmap(self._owned[name], nbytes)
            buffer = torch.frombuffer(memory, dtype=torch.uint8)
            sums = [_copy(buffer, *row) for row in zip(tensors, plan, slices, strict=True)]
            _corrupt(buffer, slices, number)
            return sums
        except BaseException:
            self._remove(name)
            raise

    def _remove(self, name: str) -> bool:
        removed = shm.remove(name, root=self._root)
        os.close(self._owned.pop(name))
        return removed


def _spec(named: NamedTensor, wire_dtype: torch.dtype) -> TensorSpec:
    dtype = wire_dtype if named.castable else named.tensor.dtype
    return TensorSpec(named.name, str(dtype).removeprefix("torch."), tuple(named.tensor.shape))


def _copy(buffer: Tensor, named: NamedTensor, spec: TensorSpec, place: shm.Slice) -> int:
    raw = buffer[place.offset : place.offset + place.nbytes]
    if place.nbytes:
        # Converts and copies in one pass, from any device.
        raw.view(getattr(torch, spec.dtype)).view(spec.shape).copy_(named.tensor)
    return checksum(raw.numpy())


def _chunks(
    plan: Sequence[TensorSpec], slices: Sequence[shm.Slice], sums: Sequence[int], limit: int
) -> tuple[tuple[rollout_pb2.TensorSlice, ...], ...]:
    messages = {
        place.name: rollout_pb2.TensorSlice(
            name=place.name, offset=place.offset, nbytes=place.nbytes, checksum=value
        )
        for place, value in zip(slices, sums, strict=True)
    }
    return tuple(tuple(messages[spec.name] for spec in chunk) for chunk in chunks_by_bytes(plan, limit))


def _without_omitted(tensors: list[NamedTensor], number: int) -> list[NamedTensor]:
    omitted = faults.active("omit", number)
    _must_exist(omitted, [named.name for named in tensors])
    return [named for named in tensors if named.name not in omitted]


def _corrupt(buffer: Tensor, slices: Sequence[shm.Slice], number: int) -> None:
    damaged = faults.active("corrupt", number)
    _must_exist(damaged, [place.name for place in slices])
    for place in slices:
        if place.name in damaged and place.nbytes:
            middle = place.offset + place.nbytes // 2
            buffer[middle] = buffer[middle] ^ 0x10


def _must_exist(wanted: Sequence[str], names: Sequence[str]) -> None:
    unknown = sorted(set(wanted) - set(names))
    if unknown:
        # A chaos test whose fault hits nothing would pass without having tested anything.
        raise InvalidInput(f"There is no tensor {unknown[0]} to damage", where=faults.VARIABLE)
