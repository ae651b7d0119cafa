"""Tokens per second through gRPC ``Rollout.Turn`` against vLLM driven directly, in the same run.

Router, engine and bridge are processes as in production. The baselines are vLLM's AsyncLLM with as many
requests in flight, and vLLM's ``LLM().generate`` with all prompts at once: same model, same engine arguments,
same prompts (given as ids: the baselines render and parse nothing), same sampling, each in a process of its
own. Passes alternate; medians count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from benchmarks.report import Claim, say
from benchmarks.rollout_parts.processes import Baseline, Headrace, Load, Passed

SUMMARY = "tokens/s through Rollout.Turn against vLLM's AsyncLLM and LLM()"
ASYNC_BAR, LLM_BAR = 0.90, 0.80
SHORT_ANSWER = 16
UNIT = "tokens/s"


class Subject(Protocol):
    """Headrace or a baseline."""

    def one_pass(self, limit: int) -> Passed:
        """All prompts once, at most ``limit`` new tokens each."""
        ...


def run(args: Sequence[str]) -> list[Claim]:
    """Measure; two claims."""
    options = _parse(args)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        subjects = _start(folder, options, stack)
        for subject in subjects.values():
            subject.one_pass(SHORT_ANSWER)
        rates = _rates(subjects, options.new_tokens, options.rounds)
        short = _rates(subjects, SHORT_ANSWER, options.rounds)
    return _claims(options, rates, short)


def _parse(args: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headrace bench rollout", description=SUMMARY)
    parser.add_argument("--model", help="a model directory (default: a Qwen3 of random weights)")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the default model")
    parser.add_argument("--layers", type=int, default=4, help="layers of the default model")
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-cache-mib", type=int, default=256)
    return parser.parse_args(list(args))


def _start(folder: Path, options: argparse.Namespace, stack: ExitStack) -> Mapping[str, Subject]:
    from benchmarks.rollout_parts import model

    length = options.prompt_tokens + options.new_tokens + 8
    path = options.model or str(
        model.build(folder / "model", hidden=options.hidden, layers=options.layers, length=length)
    )
    policy = json.dumps({"model_name": path, "precision": "float32", "max_total_sequence_length": length})
    texts = model.prompts(options.prompts, options.prompt_tokens)
    load = Load(policy, texts, options.in_flight, options.kv_cache_mib)
    say("starting Headrace's processes")
    headrace = stack.enter_context(Headrace(folder, load))
    ids = headrace.ready()
    job = folder / "job.json"
    job.write_text(json.dumps({**_shared(load), "prompts": ids, "stop_ids": [0]}), encoding="utf-8")
    subjects: dict[str, Subject] = {"headrace": headrace}
    for kind in ("async", "llm"):
        say(f"starting the baseline {kind}")
        log = stack.enter_context((folder / f"{kind}.log").open("ab"))
        baseline = Baseline(kind, job, log)
        stack.callback(baseline.close)
        baseline.ready()
        subjects[kind] = baseline
    return subjects


def _shared(load: Load) -> dict[str, Any]:
    return {
        "policy_json": load.policy_json,
        "in_flight": load.in_flight,
        "kv_cache_mib": load.kv_cache_mib,
    }


def _rates(subjects: Mapping[str, Subject], limit: int, rounds: int) -> dict[str, list[float]]:
    """Tokens per second of each pass, by subject."""
    found: dict[str, list[float]] = {name: [] for name in subjects}
    for number in range(rounds):
        for name, subject in subjects.items():
            passed = subject.one_pass(limit)
            found[name].append(passed.tokens / passed.seconds)
            say(f"{limit} new tokens, pass {number + 1}, {name}: {found[name][-1]:.0f} {UNIT}")
    return found


def _claims(
    options: argparse.Namespace, rates: Mapping[str, list[float]], short: Mapping[str, list[float]]
) -> list[Claim]:
    median = {name: statistics.median(values) for name, values in rates.items()}
    brief = {name: statistics.median(values) for name, values in short.items()}
    settings = {key: value for key, value in vars(options).items() if value is not None}

    def claim(kind: str, baseline: str, bar: float) -> Claim:
        extra = {
            "passes": list(rates["headrace"]),
            "baseline_passes": list(rates[kind]),
            f"ratio_at_{SHORT_ANSWER}_new_tokens": brief["headrace"] / brief[kind],
            f"rate_at_{SHORT_ANSWER}_new_tokens": brief["headrace"],
        }
        return Claim(
            name=f"Rollout.Turn against {baseline}",
            value=median["headrace"],
            baseline=median[kind],
            unit=UNIT,
            baseline_name=baseline,
            settings=settings,
            bar=bar,
            extra=extra,
        )

    return [
        claim("async", "AsyncLLM.generate", ASYNC_BAR),
        claim("llm", "LLM().generate", LLM_BAR),
    ]
