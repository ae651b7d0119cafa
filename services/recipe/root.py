"""The whole recipe: the seeds' tree (grpo, loss_fn, policy, ...) and Headrace's ``kind`` and ``stack``."""

from __future__ import annotations

from typing import Any, Literal

from services.recipe.grpo import Grpo, Sft
from services.recipe.loss import LossFn
from services.recipe.policy import Policy
from services.recipe.section import Section
from services.recipe.stack import Stack
from services.recipe.surroundings import Checkpointing, Cluster, Data, Env, Logger


class Recipe(Section):
    """A resolved recipe. Cross-field rules are in :mod:`services.recipe.checks`."""

    kind: Literal["grpo", "sft"] = "grpo"
    name: str = "run"
    """Names the run; its id is made from it."""
    stack: Stack = Stack()
    grpo: Grpo = Grpo()
    sft: Sft = Sft()
    loss_fn: LossFn = LossFn()
    policy: Policy
    data: Data
    env: Env = Env()
    logger: Logger = Logger()
    cluster: Cluster = Cluster()
    checkpointing: Checkpointing = Checkpointing()
    on_policy_distillation: dict[str, Any] = {}
    reward_penalties: dict[str, bool] = {}
    data_plane: dict[str, Any] = {}

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.grpo.seed if self.kind == "grpo" else self.sft.seed

    @property
    def max_steps(self) -> int:
        """Train steps after which the run ends, epochs aside."""
        return self.grpo.max_num_steps if self.kind == "grpo" else self.sft.max_num_steps

    @property
    def max_epochs(self) -> int | None:
        """Passes over the training rows after which the run ends; None for no limit."""
        return self.grpo.max_num_epochs if self.kind == "grpo" else self.sft.max_num_epochs

    @property
    def prompts_per_step(self) -> int:
        """Groups of one train step."""
        return self.grpo.num_prompts_per_step if self.kind == "grpo" else self.sft.num_prompts_per_step

    @property
    def generations_per_prompt(self) -> int:
        """Samples of one group."""
        return self.grpo.num_generations_per_prompt if self.kind == "grpo" else 1
