"""What is known of a run while it goes on, and how it is drawn.

Pure: events in, lines and tables out.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from protos.headrace.v1 import runs_pb2
from services.runtime.supervise import ProcessEvent

RECENT = 20
PHASES = ("generation", "training", "refit", "validation", "checkpoint")
_SIGNS = {"started": "starting", "ready": "ready", "exited": "ended", "stopped": "stopped"}


@dataclass(slots=True)
class RunView:
    """A run as its events tell it."""

    run: str
    started: float = field(default_factory=time.monotonic)
    max_steps: int = 0
    steps: int = 0
    phase: str = "starting"
    accuracy: list[tuple[int, float]] = field(default_factory=list)
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    values: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    tokens: float = 0.0
    processes: dict[str, str] = field(default_factory=dict)

    def add_run(self, run: runs_pb2.Run) -> None:
        """The run's record says how long it is."""
        self.max_steps = run.max_steps
        self.steps = max(self.steps, run.completed_steps)

    def add_process(self, event: ProcessEvent) -> str:
        """A process moved; the line that tells it, if it is worth one."""
        self.processes[event.name] = _SIGNS.get(event.kind, event.kind)
        if event.kind == "exited":
            return f"{event.name} {event.detail}; it is started again"
        if event.kind == "ready":
            return f"{event.name} is ready after {self.elapsed:.1f} s" + (
                " (again)" if event.restarts else ""
            )
        return ""

    def add_event(self, event: runs_pb2.RunEvent) -> str:
        """The run moved; the line that tells it."""
        values = dict(event.values)
        if event.kind == "step":
            return self._step(event.step, values)
        if event.kind == "validation":
            self.accuracy.append((event.step, values.get("accuracy", 0.0)))
            return f"step {event.step}: validation accuracy {values.get('accuracy', 0.0):.3f}"
        if event.kind in ("phase", "status"):
            self.phase = event.text
            return f"step {event.step}: {event.text}" if event.step else event.text
        return f"step {event.step}: {event.kind} {event.text}".rstrip()

    @property
    def elapsed(self) -> float:
        """Seconds since this command started."""
        return time.monotonic() - self.started

    @property
    def tokens_per_s(self) -> float:
        """Tokens trained per second of the steps seen."""
        total = self.seconds.get("total", 0.0)
        return self.tokens / total if total else 0.0

    @property
    def reward(self) -> float | None:
        """Mean of the last steps' rewards."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else None

    def waits(self) -> str:
        """Who waits for whom, as shares of the time of the steps seen."""
        total = self.seconds.get("total", 0.0)
        if not total:
            return ""
        shares = {name: self.seconds.get(name, 0.0) / total for name in PHASES}
        generation, training, refit = shares["generation"], shares["training"], shares["refit"]
        return (
            f"trainer waits for rollouts {generation:.0%}, engine waits for the trainer {training:.0%}, "
            f"both for the refit {refit:.0%}"
        )

    def _step(self, step: int, values: dict[str, float]) -> str:
        self.steps, self.values = step, values
        if "reward" in values:
            self.rewards.append(values["reward"])
        self.tokens += values.get("total_num_tokens", 0.0)
        for name, seconds in values.items():
            if name.startswith("seconds/"):
                phase = name.removeprefix("seconds/")
                self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        parts = [f"step {step}" + (f"/{self.max_steps}" if self.max_steps else "")]
        if self.reward is not None:
            parts.append(f"reward {self.reward:.3f}")
        if "loss" in values:
            parts.append(f"loss {values['loss']:.4f}")
        parts.append(f"{self.tokens_per_s:.0f} tokens/s")
        return ", ".join(parts)


def render(view: RunView) -> RenderableType:
    """The live block."""
    table = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=max(1, view.max_steps), completed=view.steps, width=40)
    table.add_row(
        Text(view.run, style="bold"), bar, f"{view.steps}/{view.max_steps or '?'} steps", _left(view)
    )
    facts = [f"phase {view.phase}"]
    if view.reward is not None:
        facts.append(f"reward {view.reward:.3f}")
    if view.accuracy:
        first, last = view.accuracy[0][1], view.accuracy[-1][1]
        facts.append(
            f"accuracy {first:.3f} -> {last:.3f}" if len(view.accuracy) > 1 else f"accuracy {last:.3f}"
        )
    if view.tokens:
        facts.append(f"{view.tokens_per_s:.0f} tokens/s")
    lines: list[RenderableType] = [table, Text("  ".join(facts))]
    starting = [name for name, state in view.processes.items() if state != "ready"]
    if starting:
        lines.append(Text("not ready: " + ", ".join(starting), style="yellow"))
    if view.waits():
        lines.append(Text(view.waits(), style="dim"))
    return Group(*lines)


def _left(view: RunView) -> str:
    """Elapsed time, and the time left at the pace of the steps seen."""
    total, done = view.seconds.get("total", 0.0), len(view.rewards)
    if not total or not done or not view.max_steps:
        return f"{view.elapsed:.0f} s"
    seen = max(1, view.steps)
    return f"{view.elapsed:.0f} s, about {(view.max_steps - view.steps) * view.elapsed / seen:.0f} s left"
