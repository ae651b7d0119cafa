"""Every key of a recipe is read by some service, refused, or listed as without effect."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from services.recipe.not_built import NO_EFFECT, switches
from services.recipe.schema import known_keys, section_at

ROOT = Path(__file__).resolve().parents[3]
ROOMS = ("services", "trainer_svc", "rollout_svc", "reward_svc", "gym_svc", "refit_bridge")
# Read through a property of the recipe, which the services use.
BY_PROPERTY = {
    "grpo.num_generations_per_prompt", "grpo.max_num_steps", "grpo.max_num_epochs", "grpo.normalize_rewards",
    "grpo.use_leave_one_out_baseline", "grpo.adv_estimator.normalize_rewards",
    "grpo.adv_estimator.use_leave_one_out_baseline", "sft.max_num_steps", "sft.max_num_epochs",
    "grpo.stop_at_validation_threshold",  # refused together with its metric
}  # fmt: skip


def words() -> set[str]:
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    sources = [path for path in files if (ROOT / "services/recipe") not in path.parents]
    return {word for path in sources for word in re.findall(r"\w+", path.read_text())}


def test_no_key_is_ignored_in_silence() -> None:
    read = words()
    values = [key for key in known_keys() if section_at(key.split(".")) is None]
    known = BY_PROPERTY | NO_EFFECT | set(switches())
    assert [key for key in values if key.split(".")[-1] not in read and key not in known] == []


def test_lists_name_keys_that_exist() -> None:
    keys = set(known_keys())
    assert set(switches()) <= keys
    assert keys >= NO_EFFECT
    assert not set(switches()) & NO_EFFECT


def test_the_page_of_keys_is_up_to_date() -> None:
    check = [sys.executable, "-m", "scripts.recipe_reference", "check"]
    done = subprocess.run(check, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
