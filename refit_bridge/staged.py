"""What the trainer says that it has staged.

Invariant: a description that is not whole, or of another version or plan than the run's, ends the publish
before any engine is touched.
"""

from __future__ import annotations

from protos.headrace.v1 import refit_pb2, trainer_pb2, types_pb2
from refit_bridge.plan import TensorSpec, check_same, check_unique, plan_hash
from refit_bridge.versions import BASE, key_of, make, text_of
from services.runtime.errors import Corrupt, Refused


def check_staged(
    staged: trainer_pb2.StageWeightsResponse, version: types_pb2.PolicyVersion, known: tuple[TensorSpec, ...]
) -> None:
    """Raise Refused for another version than ``version``, Corrupt for a description that is not whole or not
    of the plan ``known`` (empty: none is known yet)."""
    if key_of(staged.version) != key_of(version) or (
        version.digest and staged.version.digest != version.digest
    ):
        raise Refused(
            f"The trainer staged {text_of(staged.version)}, not {text_of(version)}", where="trainer"
        )
    plan = plan_of(staged)
    check_unique(plan, where="trainer")
    sent = [piece.name for chunk in staged.chunks for piece in chunk.slices]
    if sorted(sent) != sorted(spec.name for spec in plan) or plan_hash(plan) != staged.plan_hash:
        raise Corrupt("The staged chunks and the plan do not cover the same tensors", where="trainer")
    if known:
        check_same(known, plan, where=text_of(version))


def plan_of(staged: trainer_pb2.StageWeightsResponse | None) -> tuple[TensorSpec, ...]:
    """The tensors of ``staged``; none for the base model."""
    return tuple(TensorSpec.from_proto(spec) for spec in staged.plan) if staged is not None else ()


def describe(record: refit_pb2.VersionRecord, staged: trainer_pb2.StageWeightsResponse | None) -> None:
    """Put what was staged into the record; the base model has no bytes and no digest."""
    if staged is None:
        record.version.CopyFrom(make(BASE))
        return
    record.version.CopyFrom(staged.version)
    record.nbytes, record.plan_hash = staged.nbytes, staged.plan_hash
