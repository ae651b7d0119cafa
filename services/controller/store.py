"""Run records, the step journal, events and metrics in Redis.

Invariants
- A run's fields are written by the holder of its lease alone; the lease carries an epoch that only rises.
- Draws are remembered by name, so that a dispatch repeated after a crash opens the same groups.
- Events are numbered from 1 without gaps; a watcher can start again at any number.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from protos.headrace.v1 import runs_pb2
from services.runtime.errors import NotFound
from services.runtime.redis import ScriptSet

RUNS_KEY = "hr:runs"
MAX_EVENTS = 20_000
LEASE_MS = 6_000

TERMINAL = frozenset(
    (runs_pb2.RUN_STATUS_COMPLETED, runs_pb2.RUN_STATUS_FAILED, runs_pb2.RUN_STATUS_CANCELLED)
)


def status_name(status: int) -> str:
    """ "running" for RUN_STATUS_RUNNING."""
    return runs_pb2.RunStatus.Name(runs_pb2.RunStatus.ValueType(status)).removeprefix("RUN_STATUS_").lower()


@dataclass(frozen=True, slots=True)
class Draw:
    """A range of draw ordinals."""

    first: int
    count: int

    def __iter__(self) -> Any:
        return iter(range(self.first, self.first + self.count))


class RunStore:
    """Async access to what the controller keeps in Redis (``redis`` answers bytes)."""

    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self._scripts = ScriptSet("services.controller.lua")

    @staticmethod
    def key(run: str, name: str) -> str:
        """The Redis key of a run's ``name``."""
        return f"hr:{{{run}}}:{name}"

    async def _script(self, name: str, keys: list[str], args: list[str | int | bytes]) -> Any:
        return await self._scripts.call(self._redis, name, keys, args)

    # -- run records ------------------------------------------------------------------------------------

    async def create(self, run: str, fields: dict[str, str | int]) -> None:
        """Write a new run's record and list it."""
        now = time.time_ns()
        await self._redis.hset(self.key(run, "run"), mapping={"created_ns": now, **fields})
        await self._redis.zadd(RUNS_KEY, {run: now / 1e9})

    async def update(self, run: str, **fields: str | float) -> None:
        """Set fields of the run's record."""
        await self._redis.hset(self.key(run, "run"), mapping=fields)

    async def fields(self, run: str) -> dict[str, str]:
        """The record of ``run``; empty when there is none."""
        raw = await self._redis.hgetall(self.key(run, "run"))
        return {k.decode(): v.decode() for k, v in raw.items()}

    async def get(self, run: str) -> runs_pb2.Run:
        """The run as the contract shows it; raises NotFound."""
        fields = await self.fields(run)
        if not fields:
            raise NotFound(f"There is no run {run!r}", do="List runs with `headrace runs list`.")
        return run_message(run, fields)

    async def newest(self, limit: int) -> list[runs_pb2.Run]:
        """The newest runs first."""
        names = await self._redis.zrevrange(RUNS_KEY, 0, max(0, limit - 1))
        found = []
        for raw in names:
            fields = await self.fields(raw.decode())
            if fields:
                found.append(run_message(raw.decode(), fields))
        return found

    async def pending(self, stack: str) -> str | None:
        """The oldest run of this stack that has not ended, without those that were paused in the queue."""
        for raw in await self._redis.zrange(RUNS_KEY, 0, -1):
            status, owner, started = await self._redis.hmget(
                self.key(raw.decode(), "run"), "status", "stack", "started_ns"
            )
            if status is None or int(status) in TERMINAL or (owner or b"").decode() != stack:
                continue
            if int(status) != runs_pb2.RUN_STATUS_PAUSED or started:
                return str(raw.decode())
        return None

    # -- lease ------------------------------------------------------------------------------------------

    async def acquire(self, run: str, holder: str) -> int | None:
        """The epoch under which ``holder`` owns the run, or None while somebody else does."""
        epoch = await self._script(
            "acquire", [self.key(run, "lease"), self.key(run, "epoch")], [holder, LEASE_MS]
        )
        return None if int(epoch) < 0 else int(epoch)

    async def leased(self, run: str) -> bool:
        """Whether a controller drives the run at this moment."""
        return bool(await self._redis.exists(self.key(run, "lease")))

    async def release(self, run: str, holder: str) -> None:
        """Give the lease back if ``holder`` has it."""
        await self._script("release", [self.key(run, "lease")], [holder])

    # -- journal ----------------------------------------------------------------------------------------

    async def journal(self, run: str) -> dict[str, str]:
        """The whole journal."""
        raw = await self._redis.hgetall(self.key(run, "journal"))
        return {k.decode(): v.decode() for k, v in raw.items()}

    async def write_journal(self, run: str, **fields: str | float) -> None:
        """Set fields of the journal."""
        await self._redis.hset(self.key(run, "journal"), mapping=fields)

    async def draw(self, run: str, name: str, count: int) -> Draw:
        """Ordinals under ``name``: new ones the first time, the same ones ever after."""
        first, given = await self._script("draw", [self.key(run, "journal")], [f"draw:{name}", count])
        return Draw(int(first), int(given))

    async def drawn(self, run: str, name: str) -> bool:
        """Whether ``name`` has drawn before."""
        return bool(await self._redis.hexists(self.key(run, "journal"), f"draw:{name}"))

    # -- records by step --------------------------------------------------------------------------------

    async def put_step(self, run: str, step: int, record: dict[str, Any]) -> None:
        """Keep the record of a train step."""
        await self._redis.hset(self.key(run, "steps"), str(step), json.dumps(record))

    async def put_validation(self, run: str, step: int, record: dict[str, Any]) -> None:
        """Keep the record of a validation pass."""
        await self._redis.hset(self.key(run, "validations"), str(step), json.dumps(record))

    async def put_extra_seconds(self, run: str, completed: int, seconds: dict[str, float]) -> None:
        """Time spent around the steps (start, validation, checkpoint), added up by completed steps."""
        key = self.key(run, "seconds")
        for name, value in seconds.items():
            await self._redis.hincrbyfloat(key, f"{completed}:{name}", value)

    async def extra_seconds(self, run: str) -> dict[str, float]:
        """Sum by phase of what :meth:`put_extra_seconds` collected."""
        out: dict[str, float] = {}
        for field, value in (await self._redis.hgetall(self.key(run, "seconds"))).items():
            name = field.decode().split(":", 1)[1]
            out[name] = out.get(name, 0.0) + float(value)
        return out

    async def steps(self, run: str) -> dict[int, dict[str, Any]]:
        """Records of train steps, by step."""
        return await self._records(run, "steps")

    async def validations(self, run: str) -> dict[int, dict[str, Any]]:
        """Records of validation passes, by completed steps."""
        return await self._records(run, "validations")

    async def _records(self, run: str, name: str) -> dict[int, dict[str, Any]]:
        raw = await self._redis.hgetall(self.key(run, name))
        return {int(k): json.loads(v) for k, v in sorted(raw.items(), key=lambda item: int(item[0]))}

    # -- events -----------------------------------------------------------------------------------------

    async def emit(
        self, run: str, kind: str, text: str = "", *, step: int = 0, values: dict[str, float] | None = None
    ) -> None:
        """Append one event for watchers."""
        event = runs_pb2.RunEvent(at_ns=time.time_ns(), kind=kind, step=step, text=text, values=values or {})
        keys = [self.key(run, "events"), self.key(run, "sequence")]
        await self._script("event", keys, [event.SerializeToString(), MAX_EVENTS])

    async def events(self, run: str, after: int, wait_s: float) -> list[runs_pb2.RunEvent]:
        """Events numbered above ``after``; waits up to ``wait_s`` for the first."""
        key = self.key(run, "events")
        found = await self._redis.xread({key: f"{after}-0"}, count=256, block=max(1, int(wait_s * 1000)))
        out = []
        for entry_id, fields in found[0][1] if found else []:
            event = runs_pb2.RunEvent.FromString(fields[b"event"])
            event.sequence = int(entry_id.split(b"-")[0])
            out.append(event)
        return out


def run_message(run: str, fields: dict[str, str]) -> runs_pb2.Run:
    """A run record as the contract's message."""
    number = {name: int(fields.get(name) or 0) for name in
              ("status", "completed_steps", "max_steps", "created_ns", "started_ns", "ended_ns")}  # fmt: skip
    return runs_pb2.Run(
        run=run,
        name=fields.get("name", ""),
        kind=fields.get("kind", ""),
        status=runs_pb2.RunStatus.ValueType(number["status"]),
        completed_steps=number["completed_steps"],
        max_steps=number["max_steps"],
        error=fields.get("error", ""),
        created_ns=number["created_ns"],
        started_ns=number["started_ns"],
        ended_ns=number["ended_ns"],
        summary_json=fields.get("summary", ""),
        phase=fields.get("phase", ""),
    )
