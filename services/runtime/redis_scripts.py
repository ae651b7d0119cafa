"""Lua scripts kept as files of a package, run by digest.

Invariants: each script is the package's prelude followed by its own file; a Redis that lost its scripts
(restart) gets them again without the caller noticing; a script runs at most once per call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib import resources
from typing import Any

import redis as redis_py
import redis.asyncio as redis_async

from services.runtime.errors import Internal
from services.runtime.redis_errors import translated

Argument = str | bytes | int | float


class ScriptSet:
    """The ``*.lua`` files of ``package``; ``prelude`` (if there) is put before each of the others."""

    def __init__(self, package: str, *, prelude: str = "prelude.lua") -> None:
        files = {
            file.name: file.read_text(encoding="utf-8")
            for file in resources.files(package).iterdir()
            if file.name.endswith(".lua")
        }
        head = files.pop(prelude, "")
        self._package = package
        self._bodies = {name.removesuffix(".lua"): f"{head}\n{body}" for name, body in files.items()}
        self._digests = {
            name: hashlib.sha1(body.encode(), usedforsecurity=False).hexdigest()
            for name, body in self._bodies.items()
        }

    @property
    def names(self) -> list[str]:
        """Names of the scripts, without ``.lua``."""
        return sorted(self._bodies)

    def body(self, name: str) -> str:
        """Text of script ``name``, prelude included."""
        if name not in self._bodies:
            raise Internal(f"There is no Lua script {name}", where=self._package)
        return self._bodies[name]

    async def load(self, client: redis_async.Redis) -> None:
        """Send all scripts ahead of their first use."""
        with translated("SCRIPT LOAD"):
            for body in self._bodies.values():
                await client.script_load(body)

    async def call(
        self, client: redis_async.Redis, name: str, keys: Sequence[str | bytes], args: Sequence[Argument] = ()
    ) -> Any:
        """Run script ``name``; raises NotReady, Exhausted or Internal."""
        body = self.body(name)
        with translated(f"script {name}"):
            try:
                return await _run(client.evalsha(self._digests[name], len(keys), *keys, *args))
            except redis_py.exceptions.NoScriptError:
                return await _run(client.eval(body, len(keys), *keys, *args))

    def call_sync(
        self, client: redis_py.Redis, name: str, keys: Sequence[str | bytes], args: Sequence[Argument] = ()
    ) -> Any:
        """Blocking twin of :meth:`call`."""
        body = self.body(name)
        with translated(f"script {name}"):
            try:
                return client.evalsha(self._digests[name], len(keys), *keys, *args)
            except redis_py.exceptions.NoScriptError:
                return client.eval(body, len(keys), *keys, *args)


async def _run(answer: Any) -> Any:
    return await answer
