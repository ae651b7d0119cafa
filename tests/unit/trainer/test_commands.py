"""Fences, repeats, torn steps, and the queue between handlers and the main thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from protos.headrace.v1 import buffer_pb2, rollout_pb2, trainer_pb2, types_pb2
from services.runtime.errors import (
    Cancelled,
    Corrupt,
    Exhausted,
    Fenced,
    HeadraceError,
    InvalidInput,
    NotReady,
    Refused,
)  # fmt: skip
from tests.e2e.trainer.fake_buffer import manifest, step_groups
from tests.e2e.trainer.model import make_model, recipe
from trainer_svc.commands import QUEUE_COMMANDS, Commands, Snapshot
from trainer_svc.config import load_config
from trainer_svc.data.rows import build_rows
from trainer_svc.optim import build_optimizer, build_scheduler, learning_rate
from trainer_svc.trainer import Trainer

RUN = "unit-run"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_model(tmp_path_factory.mktemp("model") / "base")


class Rig:
    """A Trainer whose buffer is a function."""

    def __init__(self, base: Path, folder: Path) -> None:
        self.snapshot = Snapshot("p1")
        self.torn: list[HeadraceError] = []
        self.fetches = 0
        self.trainer = Trainer(self.snapshot, torch.device("cpu"), self.fetch, self.torn.append)
        self.setup_request = trainer_pb2.TrainerSetupRequest(
            run=RUN, kind="grpo", recipe_json=recipe(base), checkpoint_dir=str(folder), fence=fence(1), seed=1
        )

    def fetch(self, wanted: buffer_pb2.Manifest) -> list[buffer_pb2.TrajectoryGroup]:
        self.fetches += 1
        return step_groups(wanted.run, wanted.step)

    def setup(self) -> trainer_pb2.TrainerState:
        request = trainer_pb2.TrainerSetupRequest()
        request.CopyFrom(self.setup_request)
        return self.trainer.setup(request)

    def step(self, step: int, epoch: int = 1) -> trainer_pb2.StepResponse:
        wanted = manifest(RUN, step, step_groups(RUN, step))
        return self.trainer.step(trainer_pb2.StepRequest(run=RUN, fence=fence(epoch, step), manifest=wanted))


def fence(epoch: int, step: int = 0) -> types_pb2.Fence:
    return types_pb2.Fence(epoch=epoch, step=step)


@pytest.fixture
def rig(base: Path, tmp_path: Path) -> Rig:
    return Rig(base, tmp_path)


def test_a_repeated_step_returns_its_stored_result_and_trains_nothing(rig: Rig) -> None:
    rig.setup()
    first = rig.step(0)
    weights = [each.detach().clone() for each in rig.trainer._session.learner.policy.parameters()]  # type: ignore[union-attr]
    again = rig.step(0)
    assert again.repeated
    assert not first.repeated
    assert dict(again.metrics) == dict(first.metrics)
    assert rig.fetches == 1
    now = rig.trainer._session.learner.policy.parameters()  # type: ignore[union-attr]
    assert all(torch.equal(one, other) for one, other in zip(weights, now, strict=True))


def test_steps_out_of_order_are_refused_naming_both(rig: Rig) -> None:
    rig.setup()
    rig.step(0)
    rig.step(1)
    for wrong in (0, 3):
        with pytest.raises(Refused, match=f"Step {wrong} cannot be trained: 2 steps are complete"):
            rig.step(wrong)


def test_weights_travel_under_the_number_of_their_steps_only(rig: Rig) -> None:
    def stage(incarnation: int, number: int) -> trainer_pb2.StageWeightsResponse:
        version = types_pb2.PolicyVersion(incarnation=incarnation, number=number)
        return rig.trainer.stage(
            trainer_pb2.StageWeightsRequest(run=RUN, version=version, fence=fence(1, number))
        )

    rig.setup()
    rig.step(0)
    try:
        first = stage(0, 1)
        rig.step(1)
        with pytest.raises(Refused, match="Version 1 cannot be staged: the weights are those of 2 steps"):
            stage(1, 1)
        assert stage(0, 1) == first  # still held: a late engine may ask for it
        assert stage(0, 2).version.digest != first.version.digest
    finally:
        rig.trainer.close()


def test_an_older_epoch_is_fenced_after_a_newer_one_spoke(rig: Rig) -> None:
    rig.setup()
    rig.step(0, epoch=3)
    with pytest.raises(Fenced):
        rig.step(1, epoch=2)
    with pytest.raises(Fenced):
        rig.trainer.save(trainer_pb2.SaveRequest(run=RUN, fence=fence(2)))
    with pytest.raises(Fenced):
        rig.trainer.stage(trainer_pb2.StageWeightsRequest(run=RUN, fence=fence(2)))
    with pytest.raises(Fenced):
        rig.setup()
    assert rig.step(1, epoch=3).step == 1


def test_without_a_run_everything_is_not_ready(rig: Rig) -> None:
    calls: list[tuple[Callable[[Any], Any], Any]] = [
        (rig.trainer.step, trainer_pb2.StepRequest(run=RUN)),
        (rig.trainer.save, trainer_pb2.SaveRequest(run=RUN)),
        (rig.trainer.score, rollout_pb2.ScoreTokensRequest(run=RUN)),
    ]
    for method, request in calls:
        with pytest.raises(NotReady) as caught:
            method(request)
        assert caught.value.reason == "NO_RUN"


def test_a_repeated_setup_keeps_what_is_in_memory(rig: Rig) -> None:
    rig.setup()
    rig.step(0)
    assert rig.setup().completed_steps == 1
    rig.setup_request.seed = 2
    assert rig.setup().completed_steps == 0


def test_an_error_before_the_update_leaves_the_step_to_be_tried_again(rig: Rig) -> None:
    rig.setup()
    fetch = rig.fetch
    rig.trainer._fetch = lambda _: (_ for _ in ()).throw(NotReady("the buffer is away"))
    with pytest.raises(NotReady):
        rig.step(0)
    assert not rig.torn
    rig.trainer._fetch = fetch
    assert rig.step(0).step == 0


def test_an_error_after_weights_changed_ends_the_process(rig: Rig) -> None:
    rig.setup()
    learner = rig.trainer._session.learner  # type: ignore[union-attr]
    step, calls = learner.optimizer.step, []

    def fail_second(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return step(*args)

    learner.optimizer.step = fail_second  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        rig.step(0)
    assert [error.reason for error in rig.torn] == ["TORN_STEP"]
    assert not rig.snapshot.read("").ready


def test_a_manifest_of_another_step_is_refused(rig: Rig) -> None:
    rig.setup()
    wanted = manifest(RUN, 1, step_groups(RUN, 1))
    with pytest.raises(Refused, match="manifest"):
        rig.trainer.step(trainer_pb2.StepRequest(run=RUN, fence=fence(1, 0), manifest=wanted))


def _damage(group: buffer_pb2.TrajectoryGroup, what: str) -> None:
    one = group.trajectories[1]
    columns = {column.name: column for column in one.columns}
    if what == "short column":
        columns["logprobs"].data = columns["logprobs"].data[:-4]
    elif what == "wrong type":
        columns["ids"].dtype = types_pb2.DTYPE_INT64
    elif what == "missing column":
        one.columns.remove(columns["versions"])
    elif what == "attempt":
        one.attempt = 2
    elif what == "trained prompt":
        columns["mask"].data = b"\x01" * columns["mask"].shape[0]
    elif what == "missing sample":
        del group.trajectories[1]
    elif what == "other reward":
        one.reward.value = 0.25


@pytest.mark.parametrize(
    "what",
    [
        "short column",
        "wrong type",
        "missing column",
        "attempt",
        "trained prompt",
        "missing sample",
        "other reward",
    ],
)
def test_bytes_that_differ_from_the_manifest_are_corrupt(what: str) -> None:
    groups = step_groups(RUN, 0)
    wanted = manifest(RUN, 0, groups)
    _damage(groups[2], what)
    with pytest.raises(Corrupt, match="group 2, sample 1"):
        build_rows(wanted, groups, kind="grpo", max_length=32)


def test_a_failure_is_never_a_reward() -> None:
    groups = step_groups(RUN, 0)
    groups[0].trajectories[0].ClearField("reward")
    groups[0].trajectories[0].outcome = types_pb2.OUTCOME_VERIFIER_ERROR
    wanted = manifest(RUN, 0, groups)
    with pytest.raises(InvalidInput, match=r"no reward .outcome OUTCOME_VERIFIER_ERROR"):
        build_rows(wanted, groups, kind="grpo", max_length=32)


@pytest.mark.parametrize(
    ("section", "key", "value", "said"),
    [
        ("loss_fn", "use_cispo", True, "loss_fn.use_cispo"),
        ("loss_fn", "truncated_importance_sampling_ratio", 2.0, "without a type"),
        ("loss_fn", "force_on_policy_ratio", True, "more than one optimizer step"),
        ("policy", "precision", "float16", "float16"),
        ("policy", "sequence_packing", {"enabled": True}, "sequence_packing"),
        ("policy", "generation", {"top_p": 0.9}, "top_p"),
        ("policy", "unknown_key", 1, "policy.unknown_key"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_by_key(
    base: Path, section: str, key: str, value: Any, said: str
) -> None:
    import json

    tree = json.loads(recipe(base))
    tree[section][key] = value
    with pytest.raises(InvalidInput, match=said):
        load_config(json.dumps(tree))


def test_a_missing_model_is_said_in_one_line(rig: Rig) -> None:
    rig.setup_request.recipe_json = recipe(Path("/nowhere/model"))
    with pytest.raises(
        InvalidInput, match=r"There is no such model directory .policy.model_name /nowhere/model"
    ):
        rig.setup()


@pytest.mark.parametrize("name", ["os.system", "torch.optim.lr_scheduler.LinearLR", "mymodule.AdamW"])
def test_only_known_optimizers_can_be_named(base: Path, name: str) -> None:
    config = load_config(recipe(base, optimizer={"name": name, "kwargs": {}}))
    with pytest.raises(InvalidInput, match="is not known"):
        build_optimizer([torch.nn.Parameter(torch.zeros(1))], config.optim)


def test_schedules_join_at_their_milestones(base: Path) -> None:
    config = load_config(recipe(base))
    optimizer = build_optimizer([torch.nn.Parameter(torch.zeros(1))], config.optim)
    scheduler = build_scheduler(optimizer, config.optim)
    assert scheduler is not None
    rates = []
    for _ in range(6):
        rates.append(learning_rate(optimizer))
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.0003, 0.0012, 0.0021, 0.003, 0.003, 0.003])


def test_the_queue_is_bounded_and_cancelled_commands_never_begin() -> None:
    commands = Commands()
    begun: list[int] = []
    futures = [commands.submit("Step", lambda at=at: begun.append(at)) for at in range(QUEUE_COMMANDS)]
    with pytest.raises(Exhausted):
        commands.submit("Step", lambda: None)
    assert futures[1].cancel()
    thread = threading.Thread(target=commands.run)
    thread.start()
    futures[-1].result(5)
    commands.close()
    thread.join(5)
    assert begun == [0, *range(2, QUEUE_COMMANDS)]
    left = commands.submit("Step", lambda: None)
    commands.run()
    with pytest.raises(Cancelled):
        left.result(0)
