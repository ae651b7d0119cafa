"""The embedded stack: what it hands to each process is what that process understands."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from services.cli.preflight import reserve_ports
from services.cli.roster import SERVICES
from services.cli.serve import default_environment
from services.cli.stack import Layout, Stack
from services.recipe import load
from services.runtime.errors import InvalidInput
from services.runtime.home import Home
from services.runtime.settings import ServiceSettings

SETTINGS = {
    "controller": "services.controller.settings:ControllerSettings",
    "buffer": "services.buffer.service:BufferSettings",
    "gym": "gym_svc.settings:GymSettings",
    "reward": "reward_svc.settings:RewardSettings",
    "rollout": "rollout_svc.settings:RouterSettings",
    "engine": "rollout_svc.engine.settings:EngineSettings",
    "refit": "refit_bridge.settings:RefitSettings",
    "trainer": "trainer_svc.settings:TrainerSettings",
    "gateway": "services.gateway.settings:GatewaySettings",
}


def settings_of(service: str, env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> ServiceSettings:
    """The service's settings under ``env``."""
    module, _, name = SETTINGS[service].partition(":")
    cls: type[ServiceSettings] = getattr(importlib.import_module(module), name)
    with monkeypatch.context() as patch:
        for key, value in env.items():
            patch.setenv(key, value)
        return cls.load()


def stack_of(recipe: Path, home: Path, *overrides: str) -> Stack:
    found = load(recipe, overrides).recipe
    place = Home(home)
    return Stack(Layout.of_run(found, place.run("r1")), place, reserve_ports(found))


@pytest.mark.parametrize("service", sorted(name for name in SERVICES if SERVICES[name].embedded))
def test_each_service_understands_its_environment(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, service: str
) -> None:
    stack = stack_of(
        recipe, tmp_path / "home", "stack.redis_url=redis://localhost:1/0", "stack.threads={trainer: 2}"
    )
    process = next(found for found in stack.layout.members if found.service == service)
    settings = settings_of(service, stack._environment(process), monkeypatch)
    assert settings.listen == stack._ports[process.name].address
    assert settings.port_handed_over
    assert settings.home == tmp_path / "home"
    assert settings.ready_file == tmp_path / "home/runs/r1/ready" / f"{process.name}.json"
    for peer in SERVICES[service].peers:
        assert getattr(settings, peer) == stack._ports[peer].address
    if SERVICES[service].redis:
        assert getattr(settings, "redis_url") == "redis://localhost:1/0"  # noqa: B009
    stack.kill()


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_services_started_by_hand_find_each_other(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(service, default_environment(SERVICES[service]), monkeypatch)
    assert settings.listen == f"127.0.0.1:{SERVICES[service].port}"
    for peer in SERVICES[service].peers:
        assert getattr(settings, peer) == f"127.0.0.1:{SERVICES[peer].port}"


def test_supervised_runs_render_and_replicas_are_numbered(recipe: Path, tmp_path: Path) -> None:
    overrides = ("kind=sft", "sft.num_prompts_per_step=32", "stack.engines=2", "stack.replicas.gym=2")
    stack = stack_of(recipe, tmp_path / "home", *overrides)
    names = {process.name: process for process in stack.layout.members}
    assert {"engine-0", "engine-1", "gym-0", "gym-1", "trainer"} <= set(names)
    assert stack._environment(names["engine-1"])["HEADRACE_ENGINE_BACKEND"] == "render"
    assert stack._environment(names["buffer"])["HEADRACE_BUFFER_STACK"] == stack.layout.name
    assert "HEADRACE_CONTROLLER_GYM" not in stack._environment(names["controller"])
    stack.kill()


def test_an_address_off_loopback_is_refused(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_GYM_LISTEN", "0.0.0.0:7002")
    with pytest.raises(InvalidInput, match="loopback"):
        reserve_ports(load(recipe).recipe)
