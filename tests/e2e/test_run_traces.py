"""Traces of a finished run: one tree per trajectory, linked from the train step that used it."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest

from tests.e2e.conftest import PROMPTS, SAMPLES, STEPS, VALIDATION_ROWS, Run

pytest.importorskip("vllm")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

Span = dict[str, Any]
TREE = {
    "dispatch": None,
    "sample": "dispatch",
    "turn": "sample",
    "rollout.turn": "turn",
    "engine.turn": "rollout.turn",
    "reward": "sample",
    "reward.score": "reward",
    "append": "sample",
    "buffer.append": "append",
}
ROOMS = {
    "dispatch": "controller", "sample": "gym", "rollout.turn": "rollout", "engine.turn": "engine",
    "reward.score": "reward", "buffer.append": "buffer", "train.step": "trainer",
}  # fmt: skip


@pytest.fixture(scope="module")
def traces(grpo_run: Run) -> dict[str, list[Span]]:
    """All spans by trace."""
    return by_trace(grpo_run.spans())


def roots(traces: dict[str, list[Span]], book: str) -> list[Span]:
    """The dispatch spans of a book."""
    found = (span for spans in traces.values() for span in spans if span["name"] == "dispatch")
    return [span for span in found if span["attributes"]["headrace.book"] == book]


def edges(spans: list[Span]) -> dict[str, str | None]:
    """Name of each span and of its parent, which must be there; server spans of calls are passed over."""
    by_id = {span["span_id"]: span for span in spans}
    found = {}
    for span in spans:
        parent = span["parent_id"] and by_id[span["parent_id"]]
        while parent and parent["kind"] == "server":
            parent = parent["parent_id"] and by_id[parent["parent_id"]]
        found[span["name"]] = parent["name"] if parent else None
    return found


def check_trees(traces: dict[str, list[Span]], groups: int) -> None:
    """Every trained trajectory is one tree without a gap between services, and no id stands twice."""
    dispatched = roots(traces, "train")
    assert len(dispatched) == groups * SAMPLES
    ids = [(trace, span["span_id"]) for trace, spans in traces.items() for span in spans]
    assert len(ids) == len(set(ids))
    for root in dispatched:
        spans = traces[root["trace_id"]]
        assert [span["name"] for span in spans if span["parent_id"] is None] == ["dispatch"]
        found = edges(spans)
        assert {name: found.get(name, "absent") for name in TREE} == TREE
        counts = Counter(span["name"] for span in spans)
        assert {counts[name] for name in TREE} == {1}, counts
        (sample,) = (span for span in spans if span["name"] == "sample")
        assert sample["attributes"]["headrace.attempt"] == 1


def links(traces: dict[str, list[Span]], steps: int) -> dict[tuple[str, str], list[int]]:
    """The train steps that link to each span."""
    found = [span for spans in traces.values() for span in spans if span["name"] == "train.step"]
    assert sorted(span["attributes"]["step"] for span in found) == list(range(steps))
    linked: dict[tuple[str, str], list[int]] = defaultdict(list)
    for step in found:
        for link in step["links"]:
            linked[link["trace_id"], link["span_id"]].append(step["attributes"]["step"])
    return linked


def by_trace(spans: list[Span]) -> dict[str, list[Span]]:
    """Spans by trace."""
    found: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        found[span["trace_id"]].append(span)
    return found


def test_every_trained_trajectory_is_one_tree(traces: dict[str, list[Span]]) -> None:
    check_trees(traces, PROMPTS * STEPS)


def test_each_root_is_linked_from_the_step_that_used_it(traces: dict[str, list[Span]]) -> None:
    wanted = {
        (root["trace_id"], root["span_id"]): [root["attributes"]["headrace.step"]]
        for root in roots(traces, "train")
    }
    assert links(traces, STEPS) == wanted


def test_spans_name_their_run_group_and_sample_and_follow_each_other(
    traces: dict[str, list[Span]], grpo_run: Run
) -> None:
    for root in roots(traces, "train"):
        by_name = {span["name"]: span for span in traces[root["trace_id"]]}
        for name in TREE:
            span = by_name[name]
            ids = {key: str(span["attributes"].get(f"headrace.{key}")) for key in ("run", "group", "sample")}
            assert ids == {
                key: str(root["attributes"][f"headrace.{key}"]) for key in ("run", "group", "sample")
            }, name
            assert span["attributes"]["headrace.run"] == grpo_run.summary["run_id"]
            assert span["status"] == "ok"
        order = [by_name[name]["start_ns"] for name in ("dispatch", "sample", "turn", "reward", "append")]
        assert order == sorted(order)


def test_each_room_writes_its_own_spans(traces: dict[str, list[Span]]) -> None:
    for spans in traces.values():
        for span in spans:
            if span["name"] in ROOMS:
                assert span["service"] == ROOMS[span["name"]]


def test_validation_is_traced_and_never_trained_on(traces: dict[str, list[Span]]) -> None:
    for step in (0, STEPS):
        found = roots(traces, f"validation/{step}")
        assert len(found) == VALIDATION_ROWS
        for root in found:
            assert "buffer.append" in {span["name"] for span in traces[root["trace_id"]]}
