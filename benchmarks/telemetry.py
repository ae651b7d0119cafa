"""What a collector that fails costs a run: steps per hour and memory with one that is gone, and with one that
takes calls and answers none, against one that works.

The same short run of the demo's recipe, ``--rounds`` times with each collector in turn, so that a machine
that warms up or slows down does so for all. Time is that of the steps; memory is the summed
PSS of the run's processes. Both must stay within 5 % of the run whose collector works.
"""

from __future__ import annotations

import argparse
import socket
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.report import Claim, say
from benchmarks.telemetry_parts.runs import Outcome, recipe, train
from benchmarks.telemetry_parts.sink import Sink
from services.runtime.errors import InvalidInput, NotReady

SUMMARY = (
    "steps/hour and memory with a dead or silent collector of traces and metrics, against one that works"
)
BAND = 0.05
LIVE = "live"
FAULTS = {
    "nobody": "nobody listens at the collector's address",
    "silent": "the collector takes calls and answers none",
}
# Whatever else a stack runs, these report from processes of their own.
REPORTING = {"buffer", "controller", "engine", "gym", "refit", "reward", "rollout", "trainer"}


def run(args: Sequence[str]) -> list[Claim]:
    """Measure; two claims for each fault: speed, and memory."""
    options = _parse(args)
    if not (options.model / "config.json").is_file():
        raise InvalidInput(
            f"There is no model in {options.model}", where="--model", do="Run `make demo`, or name another."
        )
    found: dict[str, list[Outcome]] = defaultdict(list)
    received: dict[str, Any] = {}
    with TemporaryDirectory(prefix="hr-bench-") as name:
        folder = Path(name)
        path = recipe(folder, options.data, options.model, options.steps, options.seed)
        for number in range(1, options.rounds + 1):
            for mode in _rotated((LIVE, *FAULTS), number):
                what = f"round {number} of {options.rounds}, collector: {mode}"
                outcome, got = _measure(mode, path, folder / "home", what)
                found[mode].append(outcome)
                received[mode] = got
                say(f"  {_per_hour([outcome]):.0f} steps/hour, {outcome.pss / 2**20:.0f} MiB")
    _check_live(received[LIVE])
    return [claim for mode in FAULTS for claim in _claims(mode, options, found, received)]


def _rotated(modes: tuple[str, ...], by: int) -> tuple[str, ...]:
    """Each round begins with another mode, so that none is always the first or the last."""
    at = by % len(modes)
    return modes[at:] + modes[:at]


def _parse(args: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headrace bench telemetry", description=SUMMARY)
    parser.add_argument("--steps", type=int, default=40, help="train steps of each run")
    parser.add_argument("--rounds", type=int, default=2, help="runs with each collector")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, default=Path("build/tiny/warm"), help="model to start from")
    parser.add_argument("--data", type=Path, default=Path("build/tiny"), help="folder of the rows")
    return parser.parse_args(args)


def _measure(mode: str, path: Path, home: Path, what: str) -> tuple[Outcome, dict[str, Any]]:
    """One run with the collector ``mode``, and what that collector got."""
    if mode == "nobody":
        with socket.socket() as held:
            # Bound and not listening: nobody else can take the port meanwhile.
            held.bind(("127.0.0.1", 0))
            return train(path, home, f"http://127.0.0.1:{held.getsockname()[1]}", what), {}
    with Sink(mode) as sink:
        outcome = train(path, home, sink.address, what)
    return outcome, sink.received


def _check_live(got: dict[str, Any]) -> None:
    """The comparison means something: the collector that works heard from every service."""
    missing = REPORTING - set(got.get("services", ()))
    if missing or not got.get("spans") or not got.get("metric calls"):
        raise NotReady(f"The collector heard nothing from: {', '.join(sorted(missing)) or 'anybody'}")


def _per_hour(outcomes: Sequence[Outcome]) -> float:
    return 3600 * sum(each.steps for each in outcomes) / sum(each.seconds for each in outcomes)


def _mib(outcomes: Sequence[Outcome]) -> float:
    return statistics.fmean(each.pss for each in outcomes) / 2**20


def _claims(
    mode: str, options: argparse.Namespace, found: dict[str, list[Outcome]], received: dict[str, Any]
) -> list[Claim]:
    settings = {"steps": options.steps, "rounds": options.rounds, "seed": options.seed}
    speed, base_speed = _per_hour(found[mode]), _per_hour(found[LIVE])
    memory, base_memory = _mib(found[mode]), _mib(found[LIVE])
    extra = {
        "fault": FAULTS[mode], "collector_live": received[LIVE], "collector": received[mode],
        "around_s": [round(each.around_s, 2) for each in found[mode]],
        "around_s_live": [round(each.around_s, 2) for each in found[LIVE]],
    }  # fmt: skip
    return [
        Claim(
            name=f"telemetry, {mode}: speed", value=speed, baseline=base_speed, unit="steps/hour",
            baseline_name="the same run with a collector that works", settings=settings, bar=1 - BAND,
            extra={**extra, "within_band": abs(speed / base_speed - 1) <= BAND},
        ),
        # Turned round, because a bar is a least ratio: the fault may not make the run heavier.
        Claim(
            name=f"telemetry, {mode}: memory", value=base_memory, baseline=memory, unit="MiB, summed PSS",
            baseline_name=f"the run in which {FAULTS[mode]} (value: with a collector that works)",
            settings=settings, bar=1 - BAND, extra={"within_band": abs(memory / base_memory - 1) <= BAND},
        ),
    ]  # fmt: skip
