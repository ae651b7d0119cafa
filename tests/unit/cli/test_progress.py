"""What a person sees of a run, from its events alone."""

from __future__ import annotations

import pytest
from rich.console import Console

from protos.headrace.v1 import runs_pb2
from services.cli.progress import RunView, render
from services.cli.report import summary_rows
from services.runtime.supervise import ProcessEvent


def step(number: int, **values: float) -> runs_pb2.RunEvent:
    return runs_pb2.RunEvent(
        kind="step", step=number, values={k.replace("__", "/"): v for k, v in values.items()}
    )


@pytest.fixture
def view() -> RunView:
    view = RunView("r1")
    view.add_run(runs_pb2.Run(run="r1", max_steps=100, completed_steps=0))
    view.add_event(runs_pb2.RunEvent(kind="validation", step=0, values={"accuracy": 0.5}))
    shares = {
        "seconds__generation": 6.0,
        "seconds__training": 3.0,
        "seconds__refit": 1.0,
        "seconds__total": 10.0,
    }
    view.add_event(step(1, reward=0.25, total_num_tokens=1000.0, **shares))
    view.add_event(step(2, reward=0.75, total_num_tokens=3000.0, **shares))
    return view


def test_a_step_says_reward_and_speed(view: RunView) -> None:
    line = view.add_event(step(3, reward=0.5, loss=0.1, total_num_tokens=1000.0, seconds__total=5.0))
    assert line == "step 3/100, reward 0.500, loss 0.1000, 200 tokens/s"


def test_it_says_who_waits_for_whom(view: RunView) -> None:
    assert view.waits() == (
        "trainer waits for rollouts 60%, engine waits for the trainer 30%, both for the refit 10%"
    )


def test_the_live_block_shows_steps_reward_accuracy_and_what_is_not_ready(view: RunView) -> None:
    view.add_event(runs_pb2.RunEvent(kind="validation", step=2, values={"accuracy": 0.625}))
    view.add_process(ProcessEvent("started", "engine", 7, 0))
    view.add_process(ProcessEvent("ready", "gym", 8, 0))
    console = Console(width=160, record=True, file=None, force_terminal=False)
    with console.capture() as captured:
        console.print(render(view))
    text = captured.get()
    for part in (
        "r1",
        "2/100 steps",
        "reward 0.500",
        "accuracy 0.500 -> 0.625",
        "200 tokens/s",
        "not ready: engine",
    ):
        assert part in text
    assert "gym" not in text


def test_a_process_that_ended_is_told(view: RunView) -> None:
    assert view.add_process(ProcessEvent("started", "gym", 8, 0)) == ""
    told = view.add_process(ProcessEvent("exited", "gym", 8, 0, "ended by SIGKILL"))
    assert told == "gym ended by SIGKILL; it is started again"


def test_a_summary_of_a_failed_run_says_why_and_keeps_its_books() -> None:
    rows = dict(
        summary_rows(
            {
                "run_id": "r1", "kind": "grpo", "status": "failed", "error": "engine gone", "steps": 3,
                "max_steps": 10, "validation": {}, "metrics": {"reward": 0.5}, "engine": {},
                "ledger": {"dispatched": 5, "trained": 3, "dropped": {"failed": 2}, "open": 0},
                "timing": {"generation": 5.0, "idle": 5.0, "total": 10.0}, "throughput": {},
            }
        )
    )  # fmt: skip
    assert rows["status"] == "failed: engine gone"
    assert rows["steps"] == "3 of 10"
    assert rows["books (groups)"] == "5 dispatched = 3 trained + 2 failed dropped + 0 open"
    assert rows["time"] == "10.0 s: generation 5.0 s (50%), idle 5.0 s (50%)"
