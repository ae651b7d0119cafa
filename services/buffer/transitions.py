"""The scripts of ``lua/`` behind one call: refusals become errors of the tree.

Invariants: one call is one atomic transition; a refusal has changed nothing.
"""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis

from services.buffer import keys
from services.runtime.errors import Fenced, HeadraceError, NotReady, Refused
from services.runtime.redis_errors import translated
from services.runtime.redis_scripts import Argument, ScriptSet

_SCRIPTS = ScriptSet("services.buffer.lua")
_GRANTED = (b"ok", b"leased", b"waiting")


class Transitions:
    """Runs transitions against one Redis."""

    def __init__(self, redis: Redis) -> None:
        self.redis = redis

    async def call(self, run: str, name: str, *args: Argument) -> list[Any]:
        """The reply of script ``name``, status first; raises NotReady, Fenced or Refused."""
        reply: list[Any] = await _SCRIPTS.call(self.redis, name, [keys.config(run)], args)
        if reply[0] not in _GRANTED:
            raise _refusal(run, name, [_text(part) for part in reply])
        return reply

    async def call_at(self, key: str, name: str, *args: Argument) -> list[Any]:
        """The reply of script ``name``, which works on ``key`` alone."""
        reply: list[Any] = await _SCRIPTS.call(self.redis, name, [key], args)
        return reply

    async def require(self, run: str) -> None:
        """Raise NotReady (NO_RUN) unless ``run`` has been set up."""
        with translated("buffer"):
            known = await self.redis.exists(keys.config(run))
        if not known:
            raise no_run(run)


def no_run(run: str) -> NotReady:
    """The answer to calls about a run that this buffer does not know."""
    return NotReady(
        f"The buffer does not know run {run}", where="buffer", do="Call Buffer.Setup first.", reason="NO_RUN"
    )


def _refusal(run: str, name: str, reply: list[str]) -> HeadraceError:
    where = f"buffer, {name}"
    match reply[0]:
        case "no_run":
            return no_run(run)
        case "fenced":
            return Fenced(f"A controller with epoch {reply[1]} has taken over", where=where, epoch=reply[1])
        case "closed":
            return Refused("The book is closed", where=where, do="Open a book of another name.")
        case "not_leased":
            return Refused("The step has no leased groups", where=where, do="Lease the step first.")
        case "retired":
            return Refused(
                f"Steps below {reply[1]} are durable and their trajectories retired",
                where=where,
                do="Restore the newest checkpoint.",
            )
    raise AssertionError(f"unknown refusal {reply}")


def _text(part: Any) -> str:
    return part.decode() if isinstance(part, bytes) else str(part)
