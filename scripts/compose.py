"""Merges compose files the way ``docker compose config`` does, and checks the result.

    python -m scripts.compose check [FOLDER]      every combination of the stack, against the specification
    python -m scripts.compose merge FILE...       print the merged model

Invariants: only what our files use is implemented, and a construct that would need another rule is refused;
``${NAME}``, ``${NAME:-default}``, ``${NAME-default}`` and ``${NAME:?message}`` are interpolated in values.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "deploy/compose"
COMBINATIONS = (("cpu",), ("gpu",), ("cpu", "observability"), ("gpu", "observability"))
_VARIABLE = re.compile(r"\$(?:\$|\{(\w+)(?:(:?[-?])([^}]*))?\}|(\w+))")
# Lists that an overlay replaces instead of extending; all others are appended to.
_REPLACED = {"command", "entrypoint", "test"}
# Lists whose entries have a key: an entry with the same one is replaced.
_KEYED = {"ports": "target", "volumes": "target", "secrets": "source", "configs": "target"}


class ComposeError(Exception):
    """The files do not make a valid stack."""


def merged(files: Sequence[Path], environment: Mapping[str, str]) -> dict[str, Any]:
    """The model of ``files``, later ones over earlier ones, without ``x-`` extensions."""
    found: dict[str, Any] = {}
    for file in files:
        model = yaml.safe_load(file.read_text(encoding="utf-8"))
        if not isinstance(model, dict):
            raise ComposeError(f"{file}: no mapping")
        kept = {key: value for key, value in model.items() if not key.startswith("x-")}
        found = merge(found, interpolated(kept, environment), "")
    return found


def interpolated(value: Any, environment: Mapping[str, str]) -> Any:
    """``value`` with every variable in its strings replaced."""
    if isinstance(value, dict):
        return {key: interpolated(item, environment) for key, item in value.items()}
    if isinstance(value, list):
        return [interpolated(item, environment) for item in value]
    return _VARIABLE.sub(lambda m: _variable(m, environment), value) if isinstance(value, str) else value


def _variable(match: re.Match[str], environment: Mapping[str, str]) -> str:
    if match.group(0) == "$$":
        return "$"
    name, sign, rest = match.group(1) or match.group(4), match.group(2) or "", match.group(3) or ""
    given = environment.get(name)
    if given or (given is not None and not sign.startswith(":")):
        return given
    if sign.endswith("?"):
        raise ComposeError(f"{name} is not set: {rest}")
    return rest


def merge(low: Any, high: Any, key: str) -> Any:
    """``high`` over ``low``, both values of ``key``."""
    if key == "environment":
        return {**as_mapping(low), **as_mapping(high)}
    if key == "depends_on":
        return {**_conditions(low), **_conditions(high)}
    if isinstance(low, dict) and isinstance(high, dict):
        return {
            **low,
            **{name: merge(low[name], high[name], name) if name in low else high[name] for name in high},
        }
    if isinstance(low, list) and isinstance(high, list) and key not in _REPLACED:
        return _joined(low, high, key)
    return high


def _joined(low: list[Any], high: list[Any], key: str) -> list[Any]:
    if key not in _KEYED:
        return low + [item for item in high if item not in low]
    by_key = {entry_key(key, item): item for item in low}
    by_key.update({entry_key(key, item): item for item in high})
    return list(by_key.values())


def entry_key(kind: str, entry: Any) -> str:
    """What makes an entry of ``ports``, ``volumes``, ``secrets`` or ``configs`` unique."""
    if isinstance(entry, dict):
        return str(entry.get(_KEYED[kind], entry.get("source", "")))
    text = str(entry)
    if kind == "ports":
        return text
    if kind == "volumes":
        return text.split(":")[1] if ":" in text else text
    return text


def as_mapping(value: Any) -> dict[str, Any]:
    """``environment`` in its mapping form."""
    if isinstance(value, list):
        return {item.partition("=")[0]: item.partition("=")[2] if "=" in item else None for item in value}
    return dict(value)


def _conditions(value: Any) -> dict[str, Any]:
    return (
        {name: {"condition": "service_started"} for name in value} if isinstance(value, list) else dict(value)
    )


def faults(model: dict[str, Any], folder: Path) -> Iterator[str]:
    """What the schema cannot see: names that are not declared, files that do not exist, clashes of ports."""
    taken: dict[str, str] = {}
    for name, service in model["services"].items():
        if "image" not in service:
            yield f"{name}: no image; an overlay is missing"
        yield from (f"{name}: {fault}" for fault in _wrong_dependencies(service, model["services"]))
        for kind in ("volumes", "secrets", "configs", "networks"):
            yield from (f"{name}: {fault}" for fault in _undeclared(service.get(kind, []), kind, model))
        for port in service.get("ports", []):
            published = str(port).rpartition(":")[0]
            if taken.setdefault(published, name) != name:
                yield f"{name}: publishes {published}, which {taken[published]} publishes"
        yield from (
            f"{name}: {file} does not exist" for file in _files(service) if not (folder / file).exists()
        )
    for name, entry in model.get("configs", {}).items():
        if not (folder / entry["file"]).exists():
            yield f"configs.{name}: {entry['file']} does not exist"


def _wrong_dependencies(service: dict[str, Any], services: dict[str, Any]) -> Iterator[str]:
    for other, how in _conditions(service.get("depends_on", {})).items():
        if other not in services:
            yield f"depends on {other}, which is no service"
        elif how["condition"] == "service_healthy" and "healthcheck" not in services[other]:
            yield f"waits for the health of {other}, which has no healthcheck"


def _files(service: dict[str, Any]) -> list[str]:
    """Files of this repository that ``service`` needs: its Dockerfile, and what it mounts."""
    build = service.get("build")
    found = [f"{build['context']}/{build['dockerfile']}"] if build else []
    mounts = [str(entry).partition(":")[0] for entry in service.get("volumes", [])]
    return found + [mount for mount in mounts if mount.startswith("../")]


def _undeclared(entries: Any, kind: str, model: dict[str, Any]) -> Iterator[str]:
    declared = model.get(kind) or {}
    for entry in entries:
        source = str(entry.get("source", "") if isinstance(entry, dict) else entry).partition(":")[0]
        if kind == "volumes" and source.startswith((".", "/")):
            continue
        if source and source not in declared:
            yield f"{kind} {source} is not declared"


def check_schema(model: dict[str, Any]) -> str:
    """What the compose specification's schema has against ``model``; empty when nothing."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        yaml.safe_dump(model, file, sort_keys=False)
        file.flush()
        tool = Path(sys.executable).with_name("check-jsonschema")
        done = subprocess.run(
            [tool, "--builtin-schema", "vendor.compose-spec", file.name],
            capture_output=True,
            text=True,
            timeout=60,
        )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def check(folder: Path = FOLDER) -> int:
    """Check every combination; the number of faults."""
    count = 0
    for overlays in COMBINATIONS:
        files = [folder / f"{name}.yaml" for name in ("compose", *overlays)]
        model = merged(files, os.environ)
        found = list(faults(model, folder))
        if text := check_schema(model):
            found.append(text)
        for line in found:
            print(f"{' + '.join(overlays)}: {line}", file=sys.stderr)
        print(f"compose + {' + '.join(overlays)}: {len(model['services'])} services, {len(found)} faults")
        count += len(found)
    return count


def main(argv: Sequence[str]) -> int:
    """``check`` or ``merge``."""
    if argv[:1] == ["check"]:
        return 1 if check(Path(argv[1]) if len(argv) > 1 else FOLDER) else 0
    if argv[:1] == ["merge"] and len(argv) > 1:
        yaml.safe_dump(merged([Path(file) for file in argv[1:]], os.environ), sys.stdout, sort_keys=False)
        return 0
    print("usage: compose check [FOLDER] | merge FILE...", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
