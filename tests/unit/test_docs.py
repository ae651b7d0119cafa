"""The guides do not rot in silence: recipes load, Python compiles, links and settings are right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from gym_svc.settings import GymSettings
from refit_bridge.settings import RefitSettings
from reward_svc.settings import RewardSettings
from rollout_svc.engine.settings import EngineSettings
from rollout_svc.settings import RouterSettings
from services.buffer.service import BufferSettings
from services.controller.settings import ControllerSettings
from services.recipe.load import from_dict
from services.recipe.not_built import not_built
from services.runtime.settings import ServiceSettings
from trainer_svc.settings import TrainerSettings

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SETTINGS = (
    BufferSettings, ControllerSettings, EngineSettings, GymSettings, RefitSettings, RewardSettings,
    RouterSettings, TrainerSettings,
)  # fmt: skip


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_recipes_in_the_page_load(page: Path) -> None:
    for text in blocks(page, "yaml"):
        given = yaml.safe_load(text)
        if "policy" in given:
            assert not_built(from_dict(given).recipe) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_in_the_page_compiles(page: Path) -> None:
    for text in blocks(page, "python"):
        compile(text, page.name, "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings.__name__)
def test_every_setting_is_in_the_guide(settings: type[ServiceSettings]) -> None:
    told = set(re.findall(r"`([A-Z_]+)`", (ROOT / "docs/operations.md").read_text()))
    assert {name.upper() for name in settings.model_fields} - told == set()
