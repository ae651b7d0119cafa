"""The version ledger of a run, in Redis: what was staged, committed, failed, superseded.

Invariants
- Every write carries the writer's epoch; after a newer epoch has written, an older one is refused.
- At most one version is committed; the one before is superseded in the same write.
- The run's plan and the probe's expected answer are written with the first commit that needs them, so that a
  bridge that restarts can go on, and a bad first plan never becomes the reference.
- Generations only rise, whatever restarts, and even if Redis lost its last writes.

Keys: hash ``hr:{run}:versions`` with fields epoch, generation, committed, plan, probe, ``v:<inc>:<number>``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import redis.asyncio as redis_async

from protos.headrace.v1 import refit_pb2, types_pb2
from refit_bridge.plan import TensorSpec
from refit_bridge.versions import key_of
from services.runtime.errors import Fenced
from services.runtime.redis_errors import translated
from services.runtime.redis_scripts import ScriptSet

STAGED, COMMITTED, FAILED, SUPERSEDED = "staged", "committed", "failed", "superseded"
Logprobs = list[npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Committed:
    """The version in force: its record, and what the probe expects of an engine that holds it."""

    record: refit_pb2.VersionRecord
    expected: Logprobs

    @property
    def version(self) -> types_pb2.PolicyVersion:
        """With its digest."""
        return self.record.version


class VersionLedger:
    """The ledger of one run."""

    def __init__(self, client: redis_async.Redis, run: str) -> None:
        self._client = client
        self._key = f"hr:{{{run}}}:versions"
        self._scripts = ScriptSet("refit_bridge.lua")

    async def fence(self, epoch: int) -> None:
        """Take ``epoch``; raises Fenced when a newer one is known."""
        await self._write(epoch)

    async def next_generation(self) -> int:
        """A generation token that was never used before."""
        now = time.time_ns() // 1_000_000
        return int(await self._scripts.call(self._client, "generation", [self._key], [now]))

    async def record(self, epoch: int, record: refit_pb2.VersionRecord, state: str) -> None:
        """Write ``record`` in ``state`` (staged or failed)."""
        record.state = state
        record.at_ns = time.time_ns()
        await self._write(epoch, _field(record.version), record.SerializeToString())

    async def commit(
        self,
        epoch: int,
        record: refit_pb2.VersionRecord,
        expected: Logprobs,
        plan: Sequence[TensorSpec],
        previous: refit_pb2.VersionRecord | None,
    ) -> Committed:
        """Make ``record`` the committed version; ``plan`` is empty where nothing was transferred."""
        record.state = COMMITTED
        record.at_ns = time.time_ns()
        name = _field(record.version)
        fields: list[str | bytes] = [name, record.SerializeToString(), "committed", name]
        fields += ["probe", _pack(expected)]
        if plan:
            fields += ["plan", json.dumps([spec.to_json() for spec in plan])]
        if previous is not None and key_of(previous.version) != key_of(record.version):
            old = refit_pb2.VersionRecord()
            old.CopyFrom(previous)
            old.state = SUPERSEDED
            fields += [_field(old.version), old.SerializeToString()]
        await self._write(epoch, *fields)
        return Committed(record, expected)

    async def committed(self) -> Committed | None:
        """The version in force."""
        name, probe = await self._get("committed", "probe")
        if name is None:
            return None
        (data,) = await self._get(name.decode())
        record = refit_pb2.VersionRecord.FromString(data or b"")
        return Committed(record, _unpack(probe or b"[]"))

    async def plan(self) -> tuple[TensorSpec, ...]:
        """The run's plan; empty before the first transfer has been committed."""
        (data,) = await self._get("plan")
        rows = json.loads(data) if data else []
        return tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in rows)

    async def versions(self, limit: int) -> list[refit_pb2.VersionRecord]:
        """The newest ``limit`` records, newest first."""
        with translated(self._key):
            fields: dict[Any, Any] = await self._client.hgetall(self._key)
        found = [
            refit_pb2.VersionRecord.FromString(data)
            for name, data in fields.items()
            if name.startswith(b"v:")
        ]
        return sorted(found, key=lambda record: key_of(record.version), reverse=True)[:limit]

    async def _get(self, *fields: str) -> list[bytes | None]:
        with translated(self._key):
            found: list[Any] = await self._client.hmget(self._key, list(fields))
        return found

    async def _write(self, epoch: int, *fields: str | bytes) -> None:
        known = int(await self._scripts.call(self._client, "write", [self._key], [epoch, *fields]))
        if known != epoch:
            raise Fenced(
                f"Epoch {epoch} is older than {known}", where=self._key, do="A newer controller owns the run."
            )


def _field(version: types_pb2.PolicyVersion) -> str:
    return f"v:{version.incarnation}:{version.number}"


def _pack(expected: Logprobs) -> str:
    rows: list[Any] = [row.tolist() for row in expected]
    return json.dumps(rows)


def _unpack(data: bytes) -> Logprobs:
    return [np.asarray(row, dtype=np.float32) for row in json.loads(data)]
