"""Spans: one tree per trace in the run's file, unique ids, bounded and cheap."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.runtime import tracing
from services.runtime.home import Home
from services.runtime.ids import bind_ids
from services.runtime.trace_files import JsonlExporter

ROOT = Path(__file__).parents[3]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    tracing.setup("gym", tmp_path)
    yield Home(tmp_path)
    tracing.flush()


def test_file_tree_by_run(home: Home) -> None:
    with bind_ids(run="r1", group="g7"):
        with tracing.span("dispatch", attributes={"size": 3}) as root:
            carried = tracing.current_traceparent()
        with tracing.span("turn", parent=tracing.context_from(carried), sample=1), tracing.span("reward"):
            pass
        with (
            pytest.raises(ValueError, match="bad"),
            tracing.span("step", links=[tracing.link_from(carried), tracing.link_from("nonsense")]),
        ):
            raise ValueError("bad")
    with tracing.span("no run"):
        pass
    assert tracing.flush()
    spans = {span["name"]: span for span in tracing.read_spans(home.run("r1").root)}
    assert set(spans) == {"dispatch", "turn", "reward", "step"}
    assert spans["dispatch"]["parent_id"] is None
    assert (
        spans["turn"]["parent_id"]
        == spans["dispatch"]["span_id"]
        == f"{root.get_span_context().span_id:016x}"
    )
    assert spans["reward"]["parent_id"] == spans["turn"]["span_id"]
    assert len({spans[name]["trace_id"] for name in ("dispatch", "turn", "reward")}) == 1
    assert spans["step"]["trace_id"] != spans["turn"]["trace_id"]
    assert spans["step"]["links"] == [
        {"trace_id": spans["dispatch"]["trace_id"], "span_id": spans["dispatch"]["span_id"]}
    ]
    assert (spans["step"]["status"], spans["turn"]["status"]) == ("error", "ok")
    assert spans["dispatch"]["attributes"] == {"headrace.run": "r1", "headrace.group": "g7", "size": 3}
    assert spans["turn"]["service"] == "gym"
    assert spans["turn"]["end_ns"] >= spans["turn"]["start_ns"] > 1e18
    assert [span["name"] for span in tracing.read_spans(home.traces)] == ["no run"]
    assert tracing.dropped_spans() == 0


def test_seeding_random_does_not_repeat_ids(home: Home) -> None:
    seen = set()
    for _ in range(2):
        random.seed(0)
        with tracing.span("x"):
            seen.add(tracing.current_traceparent())
    assert len(seen) == 2


@pytest.mark.parametrize(
    "text", ["", "00-0-0-01", "00-" + "0" * 32 + "-" + "1" * 16 + "-01", "00-" + "g" * 53]
)
def test_malformed_traceparent_is_no_parent(text: str) -> None:
    assert tracing.context_from(text) is None
    assert tracing.link_from(text) is None


def test_a_hostile_run_id_stays_in_the_home(home: Home) -> None:
    with tracing.span("x", attributes={"headrace.run": "../../etc"}):
        pass
    tracing.flush()
    assert [span["name"] for span in tracing.read_spans(home.traces)] == ["x"]


def test_a_slow_disk_drops_and_never_blocks(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    unblock = threading.Event()
    append = JsonlExporter._append

    def stuck(self: JsonlExporter, run: str, texts: list[str]) -> bool:
        unblock.wait(20)
        return append(self, run, texts)

    monkeypatch.setattr(JsonlExporter, "_append", stuck)
    made = tracing.QUEUE_SPANS + 2000
    began = time.monotonic()
    for _ in range(made):
        with tracing.span("x"):
            pass
    assert time.monotonic() - began < 10
    assert not tracing.flush(0.1)
    unblock.set()
    assert tracing.flush(20)
    written = len(tracing.read_spans(home.traces))
    assert tracing.QUEUE_SPANS <= written < made
    assert tracing.dropped_spans() == made - written


def test_spans_are_written_at_exit(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys; from services.runtime import tracing; "
        "tracing.setup('once', pathlib.Path(sys.argv[1]));\nwith tracing.span('last'): pass"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True, cwd=ROOT, timeout=20)
    (file,) = (tmp_path / "traces").iterdir()
    assert file.name.startswith("once-")
    assert json.loads(file.read_text())["name"] == "last"
