"""A small recipe on disk, with what it names."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

ROW = {
    "responses_create_params": {"input": [{"type": "message", "role": "user", "content": "1 + 1 ="}]},
    "verifier": "exact_answer",
    "expected_answer": "2",
}
RECIPE = """\
name: small
grpo:
  num_prompts_per_step: 4
  num_generations_per_prompt: 8
  val_period: 0
  use_leave_one_out_baseline: false
policy:
  model_name: {model}
  train_global_batch_size: 32
  max_total_sequence_length: 64
  generation:
    max_new_tokens: 16
data:
  train: {{data_path: {rows}}}
"""

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a file below the test's folder."""

    def at(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    return at


@pytest.fixture
def recipe(write: Write, tmp_path: Path) -> Path:
    """A recipe that passes every check that needs no machine."""
    write("model/config.json", "{}")
    rows = write("rows.jsonl", "".join(json.dumps(ROW) + "\n" for _ in range(8)))
    return write("small.yaml", RECIPE.format(model=tmp_path / "model", rows=rows))
