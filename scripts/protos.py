"""Generates the contract's Python code and guards it.

``generate`` writes the code beside ``protos/headrace/v1/*.proto`` and moves the baseline
(``protos/baseline.binpb``, the contract that was last accepted) forward; it refuses a breaking change
unless told to accept it. ``check`` changes nothing and exits with 1 when committed code or baseline
differ from what the .proto files say, or when they break the baseline.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet

from scripts.proto_breaking import breaking_changes

ROOT = Path(__file__).resolve().parent.parent
CONTRACT = Path("protos/headrace/v1")
BASELINE = ROOT / "protos/baseline.binpb"
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")
TIMEOUT_S = 120


def compile_contract(out: Path) -> FileDescriptorSet:
    """Generate all code below ``out`` and return the contract's descriptors."""
    bindir = Path(sys.executable).parent
    descriptors = out / "contract.binpb"
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / CONTRACT).glob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "."]
    command += [f"--plugin={name}={bindir / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    command += [f"--{kind}_out={out}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    command += [f"--descriptor_set_out={descriptors}", *sources]
    subprocess.run(command, cwd=ROOT, check=True, timeout=TIMEOUT_S, stderr=subprocess.PIPE, text=True)
    contract = FileDescriptorSet.FromString(descriptors.read_bytes())
    descriptors.unlink()
    return contract


def _generated(root: Path) -> dict[str, Path]:
    return {path.name: path for pattern in GENERATED for path in (root / CONTRACT).glob(pattern)}


def _stale(out: Path) -> Iterator[str]:
    committed, fresh = _generated(ROOT), _generated(out)
    for name in sorted(committed.keys() | fresh.keys()):
        if name not in committed:
            yield f"{CONTRACT / name} is missing: run `make protos`"
        elif name not in fresh:
            yield f"{CONTRACT / name} belongs to no .proto file: run `make protos`"
        elif committed[name].read_bytes() != fresh[name].read_bytes():
            yield f"{CONTRACT / name} differs from its .proto file: run `make protos`"


def _broken(contract: FileDescriptorSet) -> list[str]:
    if not BASELINE.exists():
        return []
    return breaking_changes(FileDescriptorSet.FromString(BASELINE.read_bytes()), contract)


def _serialized(contract: FileDescriptorSet) -> bytes:
    return contract.SerializeToString(deterministic=True)


def check(out: Path) -> list[str]:
    """Every reason why the committed contract is not in order."""
    contract = compile_contract(out)
    problems = [*_stale(out), *_broken(contract)]
    if not problems and (not BASELINE.exists() or BASELINE.read_bytes() != _serialized(contract)):
        problems.append(f"{BASELINE.relative_to(ROOT)} is behind the contract: run `make protos`")
    return problems


def generate(out: Path, accept_breaking: bool) -> list[str]:
    """Replace the committed code and the baseline; returns the breaking changes that forbid it."""
    contract = compile_contract(out)
    if (broken := _broken(contract)) and not accept_breaking:
        return [*broken, "nothing was written; run again with ACCEPT_BREAKING=1 to take the change"]
    for old in _generated(ROOT).values():
        old.unlink()
    for name, path in _generated(out).items():
        shutil.copyfile(path, ROOT / CONTRACT / name)
    BASELINE.write_bytes(_serialized(contract))
    return []


def main() -> int:
    """Run one verb and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=("generate", "check"))
    parser.add_argument("--accept-breaking", action="store_true", help="generate although peers will break")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        try:
            problems = check(out) if arguments.verb == "check" else generate(out, arguments.accept_breaking)
        except subprocess.CalledProcessError as failure:
            problems = [f"protoc refused the contract:\n{failure.stderr}"]
    for problem in problems:
        print(f"protos: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
