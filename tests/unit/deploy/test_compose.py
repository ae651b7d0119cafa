"""Merging compose files: the rules that our overlays rely on, and the faults that must be found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.compose import COMBINATIONS, FOLDER, ComposeError, check_schema, faults, interpolated, merged
from services.cli.roster import SERVICES


def written(folder: Path, *models: dict[str, Any]) -> list[Path]:
    files = [folder / f"{i}.yaml" for i in range(len(models))]
    for file, model in zip(files, models, strict=True):
        file.write_text(yaml.safe_dump(model))
    return files


def stack(overlay: str = "cpu", *more: str) -> dict[str, Any]:
    return merged([FOLDER / f"{name}.yaml" for name in ("compose", overlay, *more)], {})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${A}", "1"), ("$A", "1"), ("${A:-2}", "1"), ("${E:-2}", "2"), ("${E-2}", ""), ("${B:-2}", "2"),
        ("${B}", ""), ("$${A}", "${A}"), ("x${A}y", "x1y"),
    ],
)  # fmt: skip
def test_variables(text: str, value: str) -> None:
    assert interpolated({"k": [text]}, {"A": "1", "E": ""}) == {"k": [value]}


def test_a_missing_required_variable_is_named() -> None:
    with pytest.raises(ComposeError, match=r"TOKEN is not set: give one"):
        interpolated("${TOKEN:?give one}", {})


def test_an_overlay_adds_to_lists_and_replaces_commands(tmp_path: Path) -> None:
    low = {"services": {"a": {
        "command": ["x"], "volumes": ["data:/one", "other:/two"], "environment": {"A": "1", "B": "1"},
        "depends_on": ["b"], "healthcheck": {"test": ["CMD", "x"], "retries": 3},
    }}}  # fmt: skip
    high = {"services": {"a": {
        "command": ["y", "z"], "volumes": ["new:/one"], "environment": ["B=2"],
        "depends_on": {"c": {"condition": "service_healthy"}}, "healthcheck": {"test": ["CMD", "y"]},
    }}}  # fmt: skip
    found = merged(written(tmp_path, low, high), {})["services"]["a"]
    assert found["command"] == ["y", "z"]
    assert found["volumes"] == ["new:/one", "other:/two"]
    assert found["environment"] == {"A": "1", "B": "2"}
    assert set(found["depends_on"]) == {"b", "c"}
    assert found["healthcheck"] == {"test": ["CMD", "y"], "retries": 3}


def test_faults_are_found(tmp_path: Path) -> None:
    model = {"services": {
        "a": {"image": "a", "depends_on": {"b": {"condition": "service_healthy"}}, "volumes": ["nowhere:/x"]},
        "b": {"ports": ["80:80"], "secrets": ["token"]},
        "c": {"image": "c", "ports": ["80:81"]},
    }}  # fmt: skip
    text = "\n".join(faults(model, tmp_path))
    for part in ("health of b", "volumes nowhere", "b: no image", "secrets token", "publishes 80"):
        assert part in text


def test_the_schema_refuses_what_compose_would() -> None:
    assert check_schema(stack()) == ""
    assert "comand" in check_schema({"services": {"a": {"image": "a", "comand": []}}})


@pytest.mark.parametrize("overlays", [("cpu",), ("gpu",)])
def test_every_service_has_a_container_and_only_the_doors_are_published(overlays: tuple[str, ...]) -> None:
    services = stack(*overlays)["services"]
    assert set(services) == {*SERVICES, "redis"}
    assert {name for name, service in services.items() if "ports" in service} == {"controller", "gateway"}
    assert all("healthcheck" in service for service in services.values())
    assert not any("container_name" in service for service in services.values())  # it would forbid --scale


def test_weights_travel_between_trainer_and_engine() -> None:
    services = stack("gpu")["services"]
    for name in ("trainer", "engine"):
        assert "weights:/dev/shm" in services[name]["volumes"]
        assert services[name]["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]


def test_every_combination_is_checked() -> None:
    overlays = {file.stem for file in FOLDER.glob("*.yaml")} - {"compose"}
    assert {name for combination in COMBINATIONS for name in combination} == overlays
