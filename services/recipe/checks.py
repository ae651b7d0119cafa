"""Rules between keys: each is a generator of the first thing that is wrong, named by its dotted key.

Pure: looks at the recipe only, at no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from services.recipe import names
from services.recipe.errors import BadKeyError
from services.recipe.root import Recipe

_BATCH = "policy.train_global_batch_size"
HOTTEST = 2.0
_TIS = "loss_fn.truncated_importance_sampling"


def check(recipe: Recipe) -> None:
    """Raise the first :class:`BadKeyError`, if any."""
    for rule in _RULES:
        for problem in rule(recipe):
            raise problem


def _batches(recipe: Recipe) -> Iterator[BadKeyError]:
    size, group = recipe.policy.train_global_batch_size, recipe.generations_per_prompt
    samples = recipe.prompts_per_step * group
    if size % group:
        yield BadKeyError(
            _BATCH,
            f"{size} is no multiple of the group ({group} samples per prompt)",
            do=f"Use {max(1, size // group) * group}, or change grpo.num_generations_per_prompt.",
        )
    if samples % size:
        yield BadKeyError(
            _BATCH,
            f"a step has {recipe.prompts_per_step} x {group} = {samples} samples, no multiple of {size}",
            do=f"Use {samples}, or one of its divisors.",
        )


def _group_size(recipe: Recipe) -> Iterator[BadKeyError]:
    alone = recipe.kind == "grpo" and recipe.grpo.num_generations_per_prompt == 1
    if alone and (recipe.grpo.leaves_one_out or recipe.grpo.normalizes_rewards):
        yield BadKeyError(
            "grpo.num_generations_per_prompt",
            "a group of 1 has no baseline",
            do="Use 2 or more.",
        )


def _lengths(recipe: Recipe) -> Iterator[BadKeyError]:
    policy, generation = recipe.policy, recipe.policy.generation
    total, longest = policy.max_total_sequence_length, generation.vllm_cfg.max_model_len
    answers = {
        "max_new_tokens": generation.max_new_tokens,
        "val_max_new_tokens": generation.val_max_new_tokens,
    }
    if longest is not None and longest < total:
        yield BadKeyError(
            "policy.generation.vllm_cfg.max_model_len",
            f"{longest} is below policy.max_total_sequence_length ({total})",
            do="Leave it out, or raise it.",
        )
    for key, value in answers.items():
        if recipe.kind == "grpo" and value is not None and value > total:
            yield BadKeyError(
                f"policy.generation.{key}",
                f"{value} is above policy.max_total_sequence_length ({total})",
                do="Lower the one or raise the other.",
            )


def _temperatures(recipe: Recipe) -> Iterator[BadKeyError]:
    generation = recipe.policy.generation
    for name in ("temperature", "val_temperature"):
        value = getattr(generation, name)
        if value is not None and value > HOTTEST:
            yield BadKeyError(
                f"policy.generation.{name}", f"{value:g} is above {HOTTEST:g}, the most that vLLM takes",
                do="Lower it.",
            )  # fmt: skip


def _asynchronous(recipe: Recipe) -> Iterator[BadKeyError]:
    ahead, grpo = recipe.grpo.async_grpo, "grpo.async_grpo"
    if recipe.kind != "grpo":
        return
    if ahead.enabled and not recipe.loss_fn.use_importance_sampling_correction:
        yield BadKeyError(
            f"{grpo}.enabled",
            "trajectories of older weights need a correction",
            do="Set loss_fn.use_importance_sampling_correction to true.",
        )
    if ahead.in_flight_weight_updates and not ahead.enabled:
        yield BadKeyError(
            f"{grpo}.in_flight_weight_updates",
            "nothing is in flight when training is synchronous",
            do=f"Set {grpo}.enabled to true.",
        )
    if ahead.in_flight_weight_updates and recipe.policy.is_vlm:
        yield BadKeyError(
            f"{grpo}.in_flight_weight_updates",
            "a vision tower that trains leaves stale image features in turns in flight",
            do="Set it to false.",
        )
    if recipe.stack.order == "ready_first" and not ahead.enabled:
        yield BadKeyError(
            "stack.order",
            "ready_first takes groups of later steps, and synchronous training opens none",
            do=f"Set {grpo}.enabled to true, or the order to in_order.",
        )


def _truncated_importance(recipe: Recipe) -> Iterator[BadKeyError]:
    loss = recipe.loss_fn
    kind, high = loss.truncated_importance_sampling_type, loss.truncated_importance_sampling_ratio
    low = loss.truncated_importance_sampling_ratio_min
    if kind is None and (high is not None or low is not None):
        yield BadKeyError(f"{_TIS}_ratio", "a bound without a type has no effect", do=f"Set {_TIS}_type.")
    if kind is not None and high is None:
        yield BadKeyError(f"{_TIS}_type", f"{kind} needs an upper bound", do=f"Set {_TIS}_ratio.")
    if kind is not None and not loss.use_importance_sampling_correction:
        yield BadKeyError(
            f"{_TIS}_type",
            "truncation needs the correction itself",
            do="Set loss_fn.use_importance_sampling_correction to true.",
        )
    if high is not None and low is not None and low >= high:
        yield BadKeyError(f"{_TIS}_ratio_min", f"{low} is not below the upper bound ({high})")


def _clips(recipe: Recipe) -> Iterator[BadKeyError]:
    low, high = recipe.grpo.advantage_clip_low, recipe.grpo.advantage_clip_high
    if low is not None and high is not None and low >= high:
        yield BadKeyError("grpo.advantage_clip_low", f"{low} is not below grpo.advantage_clip_high ({high})")
    if recipe.loss_fn.ratio_clip_c is not None and recipe.loss_fn.ratio_clip_c <= 1:
        yield BadKeyError(
            "loss_fn.ratio_clip_c", f"{recipe.loss_fn.ratio_clip_c} is not above 1", do="Use 3 or null."
        )
    if recipe.loss_fn.ratio_clip_min >= 1:
        yield BadKeyError("loss_fn.ratio_clip_min", "1 or more would let the ratio fall to 0")


def _on_policy(recipe: Recipe) -> Iterator[BadKeyError]:
    samples = recipe.prompts_per_step * recipe.generations_per_prompt
    if recipe.loss_fn.force_on_policy_ratio and recipe.policy.train_global_batch_size != samples:
        yield BadKeyError(
            "loss_fn.force_on_policy_ratio",
            f"needs one optimizer step per step, a batch of {samples}",
            do=f"Set {_BATCH} to {samples}.",
        )


def _validation(recipe: Recipe) -> Iterator[BadKeyError]:
    grpo = recipe.grpo
    wanted = grpo.val_period > 0 or grpo.val_at_start or grpo.val_at_end
    if recipe.kind == "grpo" and wanted and recipe.data.validation is None:
        yield BadKeyError(
            "grpo.val_period" if grpo.val_period > 0 else "grpo.val_at_start",
            "there are no validation rows",
            do="Set data.validation.data_path, or val_period 0 with val_at_start and val_at_end false.",
        )
    if (grpo.stop_at_validation_metric is None) != (grpo.stop_at_validation_threshold is None):
        yield BadKeyError(
            "grpo.stop_at_validation_metric", "needs its threshold, and the threshold its metric"
        )


def _names(recipe: Recipe) -> Iterator[BadKeyError]:
    env, data = recipe.env, recipe.data
    found = {f"env.environments.{name}.verifier": entry.verifier for name, entry in env.environments.items()}
    for key, name in {"env.default_verifier": env.default_verifier, **found}.items():
        yield from _unknown(key, "verifier", name, names.verifiers(env))
    for name, verifier in env.verifiers.items():
        if "path" not in verifier.options:
            yield from _unknown(f"env.verifiers.{name}", "verifier", name, set(names.VERIFIERS))
    for name, entry in env.environments.items():
        agent = entry.options.get("agent")
        yield from _unknown(f"env.environments.{name}.options", "agent", agent, set(names.AGENTS))
    for name, source in (("train", data.train), ("validation", data.validation)):
        if source is not None:
            yield from _unknown(f"data.{name}.agent", "agent", source.agent, names.agents(env))


def _unknown(key: str, what: str, name: str | None, known: set[str]) -> Iterator[BadKeyError]:
    if name is not None and name not in known:
        yield BadKeyError(key, f"there is no {what} {name!r}", do=names.remedy(name, known))


def _engines(recipe: Recipe) -> Iterator[BadKeyError]:
    stack = recipe.stack
    if stack.min_engines > stack.engines:
        yield BadKeyError(
            "stack.min_engines", f"{stack.min_engines} of {stack.engines} engines cannot be healthy"
        )


def _schedule(recipe: Recipe) -> Iterator[BadKeyError]:
    schedule = recipe.policy.scheduler
    parts = [part for part in schedule if part.name is not None]
    joins = [part for part in schedule if part.name is None]
    for part in joins:
        if part.milestones is None:
            yield BadKeyError("policy.scheduler", "an entry has neither name nor milestones")
    milestones = [step for part in joins for step in part.milestones or []]
    if len(parts) > 1 and len(milestones) != len(parts) - 1:
        yield BadKeyError(
            "policy.scheduler",
            f"{len(parts)} schedulers need {len(parts) - 1} milestones, not {len(milestones)}",
        )


_RULES: tuple[Callable[[Recipe], Iterator[BadKeyError]], ...] = (
    _group_size, _batches, _lengths, _temperatures, _truncated_importance, _asynchronous, _clips, _on_policy,
    _validation, _names, _engines, _schedule,
)  # fmt: skip
