"""What a stranger types: every wrong command line is one line on stderr and status 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def headrace(home: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.cli.main", *args],
        capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "HEADRACE_HOME": str(home), **env},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["bogus"], "No such command 'bogus'. See `headrace --help`."),
        (["run", "--grpo.seed=1"], "No such option: --grpo.seed"),
        (["run", "none.yaml"], "There is no recipe none.yaml"),
        (["runs", "list", "--limit", "0"], "'--limit'"),
        (["serve"], "Missing argument 'NAME'"),
        (["serve", "gim"], "Did you mean gym?"),
        (["runs", "show"], "There is no run yet"),
        (["runs", "audit", "none"], "There is no run 'none'"),
        (["run", "--resume", "last"], "There is no run yet"),
        (["watch", "last", "--address", "nonsense"], "'nonsense' is not HOST:PORT"),
    ],
)
def test_a_wrong_command_line_is_one_line(tmp_path: Path, args: list[str], text: str) -> None:
    done = headrace(tmp_path / "home", *args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("error: ")
    assert text in done.stderr
    assert not (tmp_path / "home").exists()


def test_no_command_shows_the_help(tmp_path: Path) -> None:
    done = headrace(tmp_path)
    assert done.returncode == 2
    assert "Usage: headrace" in done.stdout
    assert done.stderr == ""


def test_nobody_at_the_address_is_said_in_plain_words(tmp_path: Path) -> None:
    done = headrace(tmp_path, "watch", "last", "--address", "127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.startswith("error: No controller answers (127.0.0.1:1).")


def test_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = headrace(tmp_path / "file", "serve", "buffer", HEADRACE_BUFFER_LISTEN="127.0.0.1:0")
    assert done.returncode == 2
    assert "Set HEADRACE_HOME." in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
