"""The step loop: lease → step → commit → publish, fenced by (epoch, step), in lives.

Invariants
- Every command of a step can be repeated, and is after a crash; the journal moves on only when the step is
  trained, committed and published.
- A life ends when the trainer lost its memory or a service stayed away; the next one begins with recovery.
  Lives without progress are limited.
- Groups of step t open once version t - W is committed, and as soon as it is: engines work on them while the
  trainer trains. Synchronous training is W = 0; there is no other loop.
- A paused loop starts no step and opens no group, and its deadlines stand still.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import redis as redis_py

from protos.headrace.v1 import buffer_pb2, trainer_pb2, types_pb2
from services.controller.dispatch import Dispatcher
from services.controller.exposure import Exposure
from services.controller.pausing import PauseSwitch
from services.controller.peers import Peers, RunContext
from services.controller.progress import Progress
from services.controller.recovery import Recovery, TrainerLost
from services.controller.store import RunStore
from services.controller.timing import PhaseClock
from services.controller.validation import Validator
from services.runtime import metrics as telemetry
from services.runtime import tracing
from services.runtime.errors import HeadraceError, NotReady, TimedOut
from services.runtime.logs import get_logger

log = get_logger("controller")

LEASE_WAIT_S = 5.0
LIFE_PAUSE_S = 1.0
PASSING = (NotReady, TimedOut, redis_py.ConnectionError, redis_py.TimeoutError)


class StepLoop:
    """One run from where it is to its end."""

    def __init__(
        self,
        ctx: RunContext,
        peers: Peers,
        store: RunStore,
        progress: Progress,
        dispatcher: Dispatcher,
        validator: Validator,
        max_steps: int,
        switch: PauseSwitch,
    ) -> None:
        self._ctx = ctx
        self._peers = peers
        self._store = store
        self._progress = progress
        self._dispatcher = dispatcher
        self._validator = validator
        self._max_steps = max_steps
        self._recovery = Recovery(ctx, peers, store, progress, validator)
        self._clock = PhaseClock()
        self._switch = switch
        self._exposure = Exposure(peers)

    async def run(self) -> None:
        """Lives until the run is done; raises what no further life can mend."""
        failures = 0
        while True:
            before = (self._progress.completed, self._progress.incarnation)
            try:
                await self._life()
                return
            except PASSING as exc:
                moved = self._progress.completed > before[0] and not isinstance(exc, TrainerLost)
                failures = 1 if moved else failures + 1
                if failures > self._ctx.recipe.stack.max_restarts:
                    raise
                log.warning("a life of the step loop ended", error=str(exc), failures=failures)
                await asyncio.sleep(LIFE_PAUSE_S * failures)
                await self._tell(f"recovering: {exc}")

    async def _tell(self, text: str) -> None:
        """A line for watchers; the next life is not to be held up by it."""
        try:
            await self._store.emit(self._ctx.run, "log", text, step=self._progress.completed)
        except (HeadraceError, redis_py.RedisError) as exc:
            log.warning("watchers were not told", text=text, error=str(exc))

    async def _life(self) -> None:
        self._dispatcher.forget()
        with self._clock.phase("starting"):
            await self._recovery.begin()
        await self._store.emit(self._ctx.run, "phase", "running", step=self._progress.completed)
        steps = asyncio.create_task(self._steps())
        watch = asyncio.create_task(self._recovery.watch())
        try:
            await asyncio.wait((steps, watch), return_when=asyncio.FIRST_COMPLETED)
            for task in (watch, steps):
                if task.done():
                    task.result()
        finally:
            for task in (steps, watch):
                task.cancel()
            await asyncio.gather(steps, watch, return_exceptions=True)
            await self._validator.interrupt()

    async def _steps(self) -> None:
        await self._after(self._progress.completed)
        while self._progress.completed < self._max_steps:
            await self._step(self._progress.completed)
        with self._clock.phase("validation"):
            await self._validator.conclude(self._progress.completed, self._progress.incarnation)
        await self._put_extra(self._progress.completed)

    async def _open_window(self, step: int) -> None:
        """Open what may be sampled while ``step`` is the next to be trained."""
        for ahead in range(step, min(step + self._ctx.window, self._max_steps - 1) + 1):
            await self._dispatcher.open_step(ahead)

    async def _stand_still(self) -> float:
        """Wait while the run is paused; the seconds, which are not run time."""
        seconds = await self._switch.passed()
        self._clock.skip(seconds)
        return seconds

    async def _step(self, step: int) -> None:
        await self._stand_still()
        await self._exposure.begin()
        with self._clock.phase("generation"):
            await self._open_window(step)
            manifest = await self._lease(step)
        if not self._ctx.supervised:
            self._clock.split_generation(*await self._exposure.end(manifest))
        with self._clock.phase("training"), tracing.span("step", step=step):
            answer: trainer_pb2.StepResponse = await self._peers.trainer.Step(
                trainer_pb2.StepRequest(run=self._ctx.run, fence=self._ctx.fence(step), manifest=manifest)
            )
        await self._peers.buffer.Commit(
            buffer_pb2.CommitRequest(run=self._ctx.run, fence=self._ctx.fence(step))
        )
        self._progress.completed = step + 1
        if not self._ctx.supervised:
            with self._clock.phase("refit"):
                try:
                    await self._recovery.publish(wait_s=self._ctx.recipe.stack.engine_start_timeout_s)
                except BaseException:
                    # Not published: this step is repeated (its stored result) by the next life.
                    self._progress.completed = step
                    raise
        await self._record(step, manifest, answer)
        await self._after(step + 1)

    async def _lease(self, step: int) -> buffer_pb2.Manifest:
        """The step's groups; replaces dropped ones while waiting. Raises TimedOut."""
        end = time.monotonic() + self._ctx.recipe.stack.step_timeout_s
        while True:
            end += await self._stand_still()
            answer: buffer_pb2.LeaseResponse = await self._peers.buffer.Lease(
                buffer_pb2.LeaseRequest(
                    run=self._ctx.run, fence=self._ctx.fence(step), groups=self._ctx.recipe.prompts_per_step,
                    version=step, wait_s=LEASE_WAIT_S, order=self._ctx.order,
                )
            )  # fmt: skip
            if self._switch.paused:
                continue  # a leased step is leased again, with the same groups
            if answer.HasField("manifest"):
                return answer.manifest
            if answer.missing:
                await self._dispatcher.replace(step, answer.missing)
                text = f"{answer.missing} dropped groups replaced"
                await self._store.emit(self._ctx.run, "log", text, step=step)
            elif time.monotonic() > end:
                raise TimedOut(
                    f"Step {step} waits for {answer.open} open groups ({answer.ready} are ready)",
                    do="Look at the gym's and the engine's logs, or raise stack.step_timeout_s.",
                )

    async def _record(
        self, step: int, manifest: buffer_pb2.Manifest, answer: trainer_pb2.StepResponse
    ) -> None:
        """Journal, metrics and event of a finished step."""
        seconds = self._clock.record()
        metrics = {
            **batch_metrics(manifest),
            **dict(answer.metrics),
            **await self._exposure.buffered(self._ctx.run),
        }
        record = {
            "step": step,
            "metrics": metrics,
            "seconds": seconds,
            "trainer_seconds": dict(answer.seconds),
            "groups": [g.group for g in manifest.groups],
            "trained_tokens": answer.trained_tokens,
            "incarnation": self._progress.incarnation,
        }
        self._measure(step, metrics, seconds)
        await self._store.put_step(self._ctx.run, step, record)
        await self._store.write_journal(self._ctx.run, **self._progress.fields())
        await self._store.update(self._ctx.run, completed_steps=step + 1)
        values = {**metrics, **{f"seconds/{k}": v for k, v in seconds.items()}}
        await self._store.emit(self._ctx.run, "step", step=step + 1, values=values)

    def _measure(self, step: int, values: dict[str, float], seconds: dict[str, float]) -> None:
        """The step for telemetry, under the names of docs/metrics.md."""
        telemetry.run_step.set(step + 1, {"run": self._ctx.run})
        telemetry.record_all(telemetry.run_metric, values, "name", run=self._ctx.run)
        telemetry.record_all(telemetry.run_phase, seconds, "phase", run=self._ctx.run)

    async def _after(self, completed: int) -> None:
        """Validation and checkpoint that are due after ``completed`` steps.

        Nothing is opened before a pass that needs all engines; else the engines get work first of all.
        """
        last = completed >= self._max_steps
        self._validator.check()
        if self._validator.due(completed, last=last):
            with self._clock.phase("validation"):
                await self._validator.validate(completed, self._progress.incarnation, last=last)
        if not self._switch.paused and not last:
            await self._open_window(completed)
        if completed and self._save_due(completed, last=last):
            with self._clock.phase("checkpoint"):
                await self._save(completed)
        await self._put_extra(completed)

    async def _put_extra(self, completed: int) -> None:
        await self._store.put_extra_seconds(self._ctx.run, completed, self._clock.record())

    def _save_due(self, completed: int, *, last: bool) -> bool:
        config = self._ctx.recipe.checkpointing
        return config.enabled and (last or completed % config.save_period == 0)

    async def _save(self, completed: int) -> None:
        fence = self._ctx.fence(completed - 1)
        if (self._ctx.recipe.checkpointing.metric_name or "").startswith("val:"):
            await self._validator.finish()
        validations = await self._store.validations(self._ctx.run)
        metrics = {f"val:{k}": float(v) for k, v in validations.get(completed, {}).items() if _number(v)}
        answer: trainer_pb2.SaveResponse = await self._peers.trainer.Save(
            trainer_pb2.SaveRequest(
                run=self._ctx.run, fence=fence, metrics=metrics,
                run_state_json=json.dumps(await self._store.journal(self._ctx.run)),
            )
        )  # fmt: skip
        await self._peers.buffer.MarkDurable(buffer_pb2.MarkDurableRequest(run=self._ctx.run, fence=fence))
        await self._store.emit(self._ctx.run, "checkpoint", answer.path, step=completed)

    async def export(self, path: str) -> None:
        """Write the final weights as a Hugging Face directory."""
        await self._peers.trainer.Export(trainer_pb2.ExportRequest(run=self._ctx.run, path=path))
        await self._store.emit(self._ctx.run, "log", f"exported to {path}", step=self._progress.completed)


def batch_metrics(manifest: buffer_pb2.Manifest) -> dict[str, float]:
    """What the manifest alone says of a batch; empty values are left out."""
    samples = [s for g in manifest.groups for s in g.samples]
    rewards = [s.reward for s in samples if s.HasField("reward")]
    ages = [float(manifest.step) - s.version for s in samples if s.HasField("version")]
    out = {
        "total_num_tokens": float(sum(s.tokens for s in samples)),
        "mean_gen_tokens_per_sample": sum(s.sampled_tokens for s in samples) / max(1, len(samples)),
        "truncation_rate": sum(s.outcome == types_pb2.OUTCOME_TRUNCATED for s in samples)
        / max(1, len(samples)),
    }
    if rewards:
        out["reward"] = sum(rewards) / len(rewards)
    if ages:
        out["avg_trajectory_age"] = sum(ages) / len(ages)
        out["trajectory_age_max"] = max(ages)
    return out


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
