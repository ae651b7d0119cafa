"""The light rooms stay light: importing any module of them loads neither torch nor vLLM nor transformers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = """
import importlib, pathlib, pkgutil, sys
names = []
for room in sys.argv[1:]:
    package = importlib.import_module(room)
    walk = pkgutil.walk_packages(package.__path__, room + ".", onerror=lambda name: exit(name))
    names += [module.name for module in walk]
    assert names, room
for name in names:
    importlib.import_module(name)
    heavy = {"torch", "vllm", "transformers"} & set(sys.modules)
    if heavy:
        raise SystemExit(f"{name} imports {sorted(heavy)}")
print(len(names))
"""


@pytest.mark.parametrize("rooms", [("services", "protos"), ("gym_svc", "reward_svc")])
def test_no_module_imports_anything_heavy(rooms: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, *rooms],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    files = [
        path
        for room in rooms
        for path in (ROOT / room).rglob("*.py")
        if path.parent / "__init__.py" in path.parent.iterdir()
    ]
    # Every module was there to be imported: what pkgutil cannot see would not have been checked.
    assert int(done.stdout) >= len(files) - len(rooms)
