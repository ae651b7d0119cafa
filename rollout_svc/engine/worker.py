"""The worker process: imports vLLM at once, waits for its run, starts the engine, serves it.

Invariants
- Order: imports → assignment → AsyncLLM (which forks) → gRPC. No gRPC or tracing thread exists at the fork.
- One run in a life. Any end of vLLM's own process ends this one; the host starts a successor.
- Children die with this process (:mod:`rollout_svc.engine.orphans`), and it dies with its host.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING

from protos.headrace.v1 import rollout_pb2
from rollout_svc.engine.app import EngineApp
from rollout_svc.engine.lines import ENGINE_ID, EVENTS_FD, Assignment, Events
from rollout_svc.engine.orphans import bind_forks
from rollout_svc.engine.policy import EnginePolicy, read_policy
from rollout_svc.engine.rendering import Rendering
from rollout_svc.engine.settings import EngineSettings
from rollout_svc.engine.versions import Versions
from rollout_svc.turns.parse import AnswerParser
from rollout_svc.turns.render import Renderer
from services.runtime import logs, metrics, tracing
from services.runtime.errors import HeadraceError, Internal
from services.runtime.service import start_server

if TYPE_CHECKING:
    from rollout_svc.engine.core import EngineCore


WATCH_SECONDS = 0.2


class Worker:
    """One worker from its first import to its end."""

    def __init__(self, settings: EngineSettings, engine: str, events: Events) -> None:
        self._settings = settings
        self._engine = engine
        self._events = events
        self._log = logs.get_logger("engine")
        self._ended = asyncio.Event()
        self._info = rollout_pb2.EngineInfo(engine=engine)

    async def run(self, assignment: Assignment) -> int:
        """Serve ``assignment`` until told to stop; the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ended.set)
        policy = read_policy(assignment.policy_json)
        if self._settings.backend == "render":
            return await self._serve_rendering(assignment, policy)
        return await self._serve_vllm(assignment, policy)

    async def _serve_rendering(self, assignment: Assignment, policy: EnginePolicy) -> int:
        rendering = self._rendering(policy, parsers=False)
        self._describe(assignment, policy, name="render")
        await self._serve(EngineApp(assignment, self._described, rendering, None, None, self._ended.set))
        return 0

    async def _serve_vllm(self, assignment: Assignment, policy: EnginePolicy) -> int:
        # Heavy: this module is imported by a render-only worker, too.
        import vllm

        from rollout_svc.engine.launch import launch
        from rollout_svc.engine.turns import Turns
        from rollout_svc.engine.updates import Updates

        rendering = self._rendering(policy, parsers=True)
        core = launch(policy, self._settings, seed=assignment.seed, stops=sorted(rendering.renderer.stop_ids))
        try:
            await core.init_transfer()
            versions = Versions(assignment.run)
            await core.label(versions.label)
            self._describe(assignment, policy, name="vllm")
            self._info.engine_version = vllm.__version__
            self._info.device, self._info.dtype = core.device, core.dtype
            self._info.max_model_len = core.max_model_len
            self._info.max_num_seqs = core.turns_at_once
            self._info.transports.append("shm")

            def changed() -> None:
                self._info.ClearField("version")
                if versions.committed is not None:
                    self._info.version.CopyFrom(versions.committed)
                self._events.info("info", self._info)

            transports = tuple(self._info.transports)
            updates = Updates(core, versions, transports, changed, hold_seconds=self._settings.hold_seconds)
            app = EngineApp(
                assignment,
                self._described,
                rendering,
                Turns(self._engine, core, rendering, versions),
                updates,
                self._ended.set,
            )
            watches = [asyncio.create_task(self._watch(core)), asyncio.create_task(updates.watch())]
            await self._serve(app)
            for watch in watches:
                watch.cancel()
            return int(core.dead)
        finally:
            core.shutdown()

    async def _serve(self, app: EngineApp) -> None:
        listen = self._settings.listen.rpartition(":")[0] + ":0"
        settings = self._settings.model_copy(
            update={"listen": listen, "ready_file": None, "port_handed_over": False}
        )
        # Only now: its writer is a thread, and no thread may exist when vLLM forks.
        tracing.setup("engine", self._settings.home)
        metrics.setup("engine", self._settings.metrics_listen)
        running = await start_server(app, settings)
        self._info.address, self._info.ready = self._settings.reachable(running.address), True
        self._events.info("ready", self._info)
        self._log.info("serving", address=running.address, engine=self._engine)
        await self._ended.wait()
        await running.stop()
        tracing.flush()
        metrics.shutdown()

    async def _watch(self, core: EngineCore) -> None:
        # vLLM offers no event for it; its flag is cheap to read.
        while not core.dead:  # noqa: ASYNC110
            await asyncio.sleep(WATCH_SECONDS)
        self._log.error("vLLM's engine process has died")
        self._ended.set()

    def _rendering(self, policy: EnginePolicy, *, parsers: bool) -> Rendering:
        from rollout_svc.engine.parsers import make_parser
        from rollout_svc.engine.tokenizer import load_tokenizer, stop_ids

        tokenizer = load_tokenizer(policy)
        stops = stop_ids(tokenizer, policy.model)
        renderer = Renderer(
            tokenizer,
            stop_ids=stops,
            chat_template=policy.chat_template,
            template_kwargs=policy.chat_template_kwargs,
        )
        parser = make_parser(tokenizer, policy.tool_parser, policy.reasoning_parser) if parsers else None
        return Rendering(renderer, AnswerParser(tokenizer, stop_ids=stops, parser=parser))

    def _describe(self, assignment: Assignment, policy: EnginePolicy, *, name: str) -> None:
        self._info.name, self._info.run, self._info.model = name, assignment.run, policy.model

    def _described(self) -> rollout_pb2.EngineInfo:
        return self._info


def main() -> int:
    """Entry point of ``python -m rollout_svc.engine.worker``, started by the host only."""
    settings = EngineSettings.load()
    logs.configure("engine", level=settings.log_level, file=settings.log_file)
    descriptor = int(os.environ[EVENTS_FD])
    events = Events(descriptor)
    bind_forks(close_fds=(descriptor,))
    if settings.backend == "vllm":
        from rollout_svc.engine.launch import warm

        warm()
    events.send("warm")
    line = sys.stdin.buffer.readline()
    if not line:
        return 0
    try:
        worker = Worker(settings, os.environ[ENGINE_ID], events)
        return asyncio.run(worker.run(Assignment.parse(line)))
    except HeadraceError as exc:
        logs.get_logger("engine").error("engine failed", error=str(exc))
        events.failed(exc)
    except Exception as exc:  # noqa: BLE001 (the host must learn of it in any case)
        logs.get_logger("engine").error("engine failed", exc_info=exc)
        events.failed(Internal(f"{type(exc).__name__}: {exc}", where="engine start"))
    return 1


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        raise SystemExit(main())
