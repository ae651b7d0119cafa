"""Bad input through the real command: one clear line, status 2, and nothing started or written."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

Headrace = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def headrace(tmp_path: Path) -> Headrace:
    """Run the real command in a home of its own."""

    def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "services.cli.main", *args],
            capture_output=True, text=True, timeout=60, check=False,
            env={**os.environ, "HEADRACE_HOME": str(tmp_path / "home"), **env},
        )  # fmt: skip

    return run


def refused(done: subprocess.CompletedProcess[str], home: Path) -> str:
    """The one line of a command that refused its input."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("error: ")
    assert not home.exists()
    assert not [process for process in psutil.process_iter() if _home_of(process) == str(home)]
    return done.stderr.strip()


def _home_of(process: psutil.Process) -> str | None:
    with contextlib.suppress(psutil.Error):
        return process.environ().get("HEADRACE_HOME")
    return None


def test_unknown_key(headrace: Headrace, recipe: Path, tmp_path: Path) -> None:
    recipe.write_text(recipe.read_text().replace("val_period", "val_perod"))
    line = refused(headrace("run", str(recipe)), tmp_path / "home")
    assert line == f"error: Unknown key grpo.val_perod ({recipe}:5). Did you mean grpo.val_period?"


def test_batch_that_is_no_multiple_of_the_group(headrace: Headrace, recipe: Path, tmp_path: Path) -> None:
    line = refused(headrace("run", str(recipe), "grpo.num_generations_per_prompt=5"), tmp_path / "home")
    assert "32 is no multiple of the group (5 samples per prompt)" in line
    assert f"({recipe}:9)" in line


def test_missing_model_path(headrace: Headrace, recipe: Path, tmp_path: Path) -> None:
    line = refused(headrace("run", str(recipe), "policy.model_name=./none/here"), tmp_path / "home")
    assert "there is no model at ./none/here (override)" in line


def test_row_without_responses_create_params(headrace: Headrace, recipe: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    lines = rows.read_text().splitlines()
    lines[4] = json.dumps({"question": "1 + 1"})
    rows.write_text("\n".join(lines))
    line = refused(headrace("run", str(recipe)), tmp_path / "home")
    assert f"A row without responses_create_params ({rows}:5)" in line


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ({"verifier": "exact_anser"}, "unknown verifier, 'exact_anser'"),
        ({"agent_ref": {"name": "single_trun"}}, "unknown agent, 'single_trun'"),
    ],
)
def test_row_that_names_what_does_not_exist(
    headrace: Headrace, recipe: Path, tmp_path: Path, name: dict[str, object], said: str
) -> None:
    rows = tmp_path / "rows.jsonl"
    lines = rows.read_text().splitlines()
    lines[6] = json.dumps({**json.loads(lines[6]), **name})
    rows.write_text("\n".join(lines))
    line = refused(headrace("run", str(recipe)), tmp_path / "home")
    assert f"{said} ({rows}:7). Did you mean " in line


@pytest.mark.parametrize("by", ["recipe", "environment"])
def test_explicit_port_in_use(headrace: Headrace, recipe: Path, tmp_path: Path, by: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        if by == "recipe":
            done = headrace("run", str(recipe), f"stack.ports.buffer={port}")
        else:
            done = headrace("run", str(recipe), HEADRACE_BUFFER_LISTEN=f"127.0.0.1:{port}")
        assert f"Port {port} is in use" in refused(done, tmp_path / "home")


def test_no_redis(headrace: Headrace, recipe: Path, tmp_path: Path) -> None:
    done = headrace("run", str(recipe), HEADRACE_REDIS_SERVER=str(tmp_path / "none"))
    assert "HEADRACE_REDIS_SERVER names no program" in refused(done, tmp_path / "home")


def test_feature_that_is_not_built(headrace: Headrace, recipe: Path, tmp_path: Path) -> None:
    line = refused(headrace("run", str(recipe), "grpo.use_dynamic_sampling=true"), tmp_path / "home")
    assert "grpo.use_dynamic_sampling: True is not built yet (override). Set it to false." in line


@pytest.mark.parametrize("name", ["last", "nobody"])
def test_resume_of_an_unknown_run(headrace: Headrace, tmp_path: Path, name: str) -> None:
    line = refused(headrace("run", "--resume", name), tmp_path / "home")
    assert "There is no run" in line


def test_no_recipe_and_a_recipe_that_is_not_there(headrace: Headrace, tmp_path: Path) -> None:
    assert "Give a recipe, or --resume RUN" in refused(headrace("run"), tmp_path / "home")
    assert "There is no recipe none.yaml" in refused(headrace("run", "none.yaml"), tmp_path / "home")


def test_unknown_service(headrace: Headrace, tmp_path: Path) -> None:
    line = refused(headrace("serve", "trainr"), tmp_path / "home")
    assert line == "error: There is no service 'trainr'. Did you mean trainer?"


def test_plan_explains_every_key(headrace: Headrace, recipe: Path) -> None:
    done = headrace("plan", str(recipe), "grpo.use_dynamic_sampling=true", "stack.engines=2", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["not_built"] == {"grpo.use_dynamic_sampling": True}
    assert plan["samples_per_step"] == 32
    assert {"engine-0", "engine-1", "trainer", "controller"} <= set(plan["processes"])
    assert plan["keys"]["grpo.val_period"] == {"value": 0, "origin": f"{recipe}:5"}
    assert plan["keys"]["stack.engines"] == {"value": 2, "origin": "override"}
    assert plan["keys"]["loss_fn.ratio_clip_min"]["origin"] == "default"


def test_doctor_says_what_is_missing(headrace: Headrace, tmp_path: Path) -> None:
    healthy = json.loads(headrace("doctor", "--json").stdout)
    assert {check["name"] for check in healthy["checks"]} >= {
        "python",
        "torch",
        "vllm",
        "redis",
        "home",
        "cores",
    }
    done = headrace("doctor", "--json", HEADRACE_REDIS_SERVER=str(tmp_path / "none"))
    assert done.returncode == 1
    sick = json.loads(done.stdout)
    assert not sick["healthy"]
    assert [check["state"] for check in sick["checks"] if check["name"] == "redis"] == ["fail"]


def test_an_empty_home_lists_no_runs(headrace: Headrace, tmp_path: Path) -> None:
    done = headrace("runs", "list", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (0, [])
    for command in ("show", "audit"):
        assert "There is no run yet" in refused(
            headrace("runs", command, "last", "--json"), tmp_path / "home"
        )


def test_help_is_quick_because_it_imports_nothing_else() -> None:
    code = (
        "import sys, services.cli.main\n"
        "print([m for m in ('grpc', 'pydantic', 'redis', 'numpy', 'yaml', 'rich.live') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_gpus_that_are_not_there_or_not_built(headrace: Headrace, recipe: Path, tmp_path: Path) -> None:
    line = refused(headrace("run", str(recipe), "cluster.gpus_per_node=8"), tmp_path / "home")
    assert "cluster.gpus_per_node: 8 is not built yet" in line


def test_redis_of_a_url_that_does_not_answer(headrace: Headrace, recipe: Path, tmp_path: Path) -> None:
    line = refused(headrace("run", str(recipe), "stack.redis_url=redis://127.0.0.1:1"), tmp_path / "home")
    assert "No Redis answers (redis://127.0.0.1:1)" in line
