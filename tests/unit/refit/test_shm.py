from __future__ import annotations

import os
from pathlib import Path

import pytest

from refit_bridge.plan import TensorSpec
from refit_bridge.transports import shm
from services.runtime.errors import Exhausted, InvalidInput, NotFound


@pytest.mark.parametrize(
    "name",
    ["../etc/passwd", "headrace-r-0-1-0123456789abcdef/x", "/dev/shm/headrace-r-0-1-0123456789abcdef",
     "headrace-..-0-1-0123456789abcdef", "refit-1", "headrace-r-0-1-xyz", ""],
)  # fmt: skip
def test_only_names_of_ours_are_opened(name: str):
    with pytest.raises(InvalidInput):
        shm.safe_path(name)


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path):
    name = shm.new_name("r", 0, 1)
    (tmp_path / "secret").write_text("x")
    (tmp_path / name).symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="symbolic"):
        shm.open_existing(name, root=tmp_path)


def test_tensors_are_aligned_and_do_not_overlap():
    plan = [TensorSpec("a", "uint8", (1,)), TensorSpec("b", "float32", (33,)), TensorSpec("c", "int8", (0,))]
    slices, size = shm.layout(plan)
    assert [(s.offset, s.nbytes) for s in slices] == [(0, 1), (64, 132), (256, 0)]
    assert size == 256


def test_a_run_sweeps_its_own_stale_files_only(tmp_path: Path):
    mine, kept, other = (
        shm.new_name("a run", 0, 1),
        shm.new_name("a run", 0, 2),
        shm.new_name("a run-2", 0, 1),
    )
    for name in (mine, kept, other, "unrelated"):
        (tmp_path / name).touch()
    assert shm.sweep("a run", keep=[kept], root=tmp_path) == [mine]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([kept, other, "unrelated"])


def test_files_of_killed_owners_are_swept_by_any_run_and_owned_ones_are_not(tmp_path: Path):
    owned, orphan, young = (shm.new_name("elsewhere", 0, n) for n in (1, 2, 3))
    held = shm.create(owned, 64, root=tmp_path)
    for name in (orphan, young):
        os.close(shm.create(name, 64, root=tmp_path))
    for name in (owned, orphan):
        os.utime(tmp_path / name, (0, 0))
    assert shm.sweep("r", root=tmp_path) == [orphan]
    os.close(held)
    assert shm.sweep("r", root=tmp_path) == [owned]
    assert [p.name for p in tmp_path.iterdir()] == [young]


def test_files_are_private_and_have_their_memory_at_once(tmp_path: Path):
    name = shm.new_name("r", 1, 2)
    os.close(shm.create(name, 4096, root=tmp_path))
    stat = (tmp_path / name).stat()
    assert stat.st_mode & 0o777 == 0o600
    assert stat.st_blocks * 512 >= 4096


def test_too_little_room_says_how_much_and_what_to_do():
    with pytest.raises(Exhausted, match=r"do not fit.*shm-size"):
        shm.create(shm.new_name("r", 0, 1), 1 << 60)


def test_a_file_that_is_gone_is_not_found(tmp_path: Path):
    with pytest.raises(NotFound, match="Stage the version again"):
        shm.open_existing(shm.new_name("r", 0, 1), root=tmp_path)
    assert not shm.remove(shm.new_name("r", 0, 1), root=tmp_path)
