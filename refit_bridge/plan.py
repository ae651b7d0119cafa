"""The plan of a transfer: which tensors, of which shape and type, in which chunks. Free of torch.

Invariants
- Names are the trainer's checkpoint names; a name occurs once; order is the order of transfer.
- The hash does not depend on the order, so that two trainers with the same tensors agree.
- A run's plan never changes: a missing, extra or retyped name is an error that names it (vLLM itself
  accepts a partial stream in silence and keeps the old weights).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from protos.headrace.v1 import rollout_pb2, types_pb2
from services.runtime.errors import InvalidInput, Refused

ITEM_BYTES: dict[str, int] = {
    "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
}  # fmt: skip
_MAX_NAMED = 8


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor: checkpoint name, dtype name (torch's, such as ``bfloat16``) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    def to_proto(self) -> rollout_pb2.TensorSpec:
        """The contract's message."""
        return rollout_pb2.TensorSpec(name=self.name, dtype=dtype_number(self.dtype), shape=self.shape)

    @classmethod
    def from_proto(cls, message: rollout_pb2.TensorSpec) -> TensorSpec:
        """Read the contract's message; raises InvalidInput for an unknown dtype."""
        return cls(message.name, dtype_name(message.dtype), tuple(message.shape))

    def to_json(self) -> list[object]:
        """Name, dtype and shape as plain values."""
        return [self.name, self.dtype, list(self.shape)]


def dtype_number(name: str) -> types_pb2.DType.ValueType:
    """The contract's number of a dtype name; raises InvalidInput for one that cannot travel."""
    if name not in ITEM_BYTES:
        raise InvalidInput(
            f"Tensors of type {name} cannot be transferred", do=f"Use {', '.join(ITEM_BYTES)}."
        )
    return types_pb2.DType.Value(f"DTYPE_{name.upper()}")


def dtype_name(number: types_pb2.DType.ValueType) -> str:
    """The dtype name of a contract number."""
    name = types_pb2.DType.Name(number).removeprefix("DTYPE_").lower()
    dtype_number(name)
    return name


def plan_hash(plan: Iterable[TensorSpec]) -> str:
    """SHA-256 (hex) over names, dtypes and shapes, independent of order."""
    rows = sorted((spec.to_json() for spec in plan), key=lambda row: str(row[0]))
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def version_digest(plan: Sequence[TensorSpec], checksums: Sequence[int]) -> str:
    """SHA-256 (hex) over names, shapes, dtypes and 64-bit checksums: the identity of one set of weights."""
    rows = sorted(
        ([*spec.to_json(), f"{checksum:016x}"] for spec, checksum in zip(plan, checksums, strict=True)),
        key=lambda row: str(row[0]),
    )
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def check_unique(plan: Sequence[TensorSpec], *, where: str = "") -> None:
    """Raise Refused when a name occurs twice."""
    seen: set[str] = set()
    for spec in plan:
        if spec.name in seen:
            raise Refused(f"Tensor {spec.name} occurs twice in the plan", where=where, reason="PLAN_MISMATCH")
        seen.add(spec.name)


def check_same(expected: Iterable[TensorSpec], given: Iterable[TensorSpec], *, where: str = "") -> None:
    """Raise Refused (reason PLAN_MISMATCH) naming what is missing, extra or of another type or shape."""
    old = {spec.name: spec for spec in expected}
    new = {spec.name: spec for spec in given}
    problems = [
        *_named("missing", [name for name in old if name not in new]),
        *_named("extra", [name for name in new if name not in old]),
        *_named("changed", [_change(old[n], new[n]) for n in old if n in new and old[n] != new[n]]),
    ]
    if problems:
        raise Refused(
            f"The tensors differ from this run's plan: {'; '.join(problems)}",
            where=where,
            do="Publish the full set of tensors of the run's model.",
            reason="PLAN_MISMATCH",
        )


def chunks_by_bytes(plan: Sequence[TensorSpec], limit: int) -> list[list[TensorSpec]]:
    """Split in order into chunks of at most ``limit`` bytes; a larger tensor is a chunk of its own."""
    chunks: list[list[TensorSpec]] = []
    size = 0
    for spec in plan:
        if not chunks or size + spec.nbytes > limit:
            chunks.append([])
            size = 0
        chunks[-1].append(spec)
        size += spec.nbytes
    return chunks


def _change(old: TensorSpec, new: TensorSpec) -> str:
    return f"{old.name} was {old.dtype}{list(old.shape)}, is {new.dtype}{list(new.shape)}"


def _named(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    rest = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return [f"{what} {', '.join(names[:_MAX_NAMED])}{rest}"]
