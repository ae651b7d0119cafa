"""Tokens are judged under the weights that sampled them, on a tiny real model that moves between versions."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protos.headrace.v1 import buffer_pb2, trainer_pb2, types_pb2
from tests.e2e.trainer.fake_buffer import column, manifest, step_groups
from tests.e2e.trainer.model import make_model, recipe
from trainer_svc.algorithms.metrics import MISMATCH
from trainer_svc.config import load_config
from trainer_svc.data.rows import StepRows, build_rows
from trainer_svc.learner import Learner
from trainer_svc.models.policy import Policy
from trainer_svc.session import Session
from trainer_svc.versions import Version

CPU = torch.device("cpu")
PROMPT = 6


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "base")


def asynchronous(base: Path, window: int, rescore_samples: int | None = None, **policy: Any) -> str:
    tree = json.loads(recipe(base, scheduler=[], **policy))
    if window:
        tree["grpo"]["async_grpo"] = {"enabled": True, "max_trajectory_age_steps": window}
    tree["stack"] = {"rescore_samples": rescore_samples}
    return json.dumps(tree)


class Run:
    """A learner whose every version is remembered, as engines would hold it."""

    def __init__(self, text: str, base: Path) -> None:
        self.learner = Learner(load_config(text), str(base), CPU)
        self.incarnation = 0
        self.sampled_by: dict[Version, Policy] = {}
        self._remember(0)

    def _remember(self, number: int) -> None:
        self.sampled_by[Version(self.incarnation, number)] = copy.deepcopy(self.learner.policy)

    def step(self, step: int, *versions: Version) -> dict[str, float]:
        """Train step ``step`` on samples that ``versions`` sampled, token by token in turns."""
        found = self.learner.train(self.rows(step, versions), Version(self.incarnation, step))
        self._remember(step + 1)
        return found

    def rows(self, step: int, versions: tuple[Version, ...]) -> StepRows:
        groups = step_groups("r", step)
        for group in groups:
            for each in group.trajectories:
                self._sample(each, versions)
        return build_rows(manifest("r", step, groups), groups, kind="grpo", max_length=32)

    def _sample(self, each: types_pb2.Trajectory, versions: tuple[Version, ...]) -> None:
        """Columns as an engine would have written them that changed its weights after every token."""
        ids = torch.from_numpy(np.frombuffer(each.columns[0].data, "<i4").astype(np.int64))
        numbers, logprobs = np.full(len(ids), -1, "<i4"), np.zeros(len(ids), "<f4")
        for turn, version in enumerate(versions):
            places = slice(PROMPT + turn, None, len(versions))
            with torch.no_grad():
                scores = self.sampled_by[version](ids[None], torch.ones(1, len(ids), dtype=torch.bool), 1.0)
            logprobs[places], numbers[places] = scores.logprobs[0].numpy()[places], version.number
        each.columns[1].CopyFrom(column("logprobs", types_pb2.DTYPE_FLOAT32, logprobs))
        each.columns[2].CopyFrom(column("versions", types_pb2.DTYPE_INT32, numbers))
        each.policy_versions.extend(
            types_pb2.PolicyVersion(incarnation=version.incarnation, number=version.number)
            for version in versions
        )


def trained_tokens(step: int) -> int:
    return sum(
        each.columns[0].shape[0] - PROMPT for group in step_groups("r", step) for each in group.trajectories
    )


def test_older_tokens_of_mixed_rows_are_judged_by_their_own_version(base: Path) -> None:
    run = Run(asynchronous(base, 2), base)
    one, two, three = (Version(0, number) for number in range(3))
    run.step(0, one)
    run.step(1, one, two)
    found = run.step(2, one, two, three)
    assert found["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)
    assert found["token_mult_prob_error_raw"] > 1.01
    assert found["gen_kl_error"] < 1e-7 < found["gen_kl_error_raw"]
    assert found["rescored_share"] == 1.0
    assert 0.5 < found["rescored_tokens"] / trained_tokens(2) < 0.75
    assert found["unheld_version_tokens"] == 0
    assert found["token_age_max"] == 2


def test_what_trains_does_not_depend_on_rescoring(base: Path) -> None:
    weights = []
    for samples in (None, 0):
        run = Run(asynchronous(base, 1, samples), base)
        run.step(0, Version(0, 0))
        run.step(1, Version(0, 0), Version(0, 1))
        weights.append(list(run.learner.policy.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_no_more_versions_are_held_than_may_be_trained_on(base: Path) -> None:
    run = Run(asynchronous(base, 2), base)
    held = []
    for step in range(4):
        run.step(step, Version(0, step))
        held.append([version.number for version in run.learner.rescorer.versions])
    assert held == [[0], [0, 1], [1, 2], [2, 3]]


def test_tokens_of_a_version_that_is_not_held_are_left_out_and_counted(base: Path) -> None:
    run = Run(asynchronous(base, 1), base)
    for step in range(2):
        run.step(step, Version(0, step))
    found = run.step(2, Version(0, 0), Version(0, 2))
    assert found["unheld_version_tokens"] / trained_tokens(2) == pytest.approx(1 - found["rescored_share"])
    assert 0.4 < found["rescored_share"] < 0.6
    assert found["rescored_tokens"] == 0
    assert found["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)
    found = run.step(3, Version(0, 0))
    assert found["rescored_share"] == 0
    assert not set(MISMATCH) & set(found)
    assert found["token_mult_prob_error_raw"] > 1.01


def test_a_chosen_number_of_samples_is_judged_whole(base: Path) -> None:
    run = Run(asynchronous(base, 1, 4), base)
    run.step(0, Version(0, 0))
    found = run.step(1, Version(0, 0), Version(0, 1))
    assert 0.15 < found["rescored_share"] < 0.35
    assert 0.4 < found["rescored_tokens"] / trained_tokens(1) / found["rescored_share"] < 0.6
    assert found["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)


def test_without_rescoring_current_tokens_are_judged_alone_and_nothing_is_held(base: Path) -> None:
    run = Run(asynchronous(base, 1, 0), base)
    run.step(0, Version(0, 0))
    found = run.step(1, Version(0, 0), Version(0, 1))
    assert run.learner.rescorer.versions == []
    assert found["rescored_tokens"] == 0
    assert 0.4 < found["rescored_share"] < 0.6
    assert found["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)
    assert found["token_mult_prob_error_raw"] > 1.001


def test_synchronous_training_has_one_value_under_both_names(base: Path) -> None:
    run = Run(asynchronous(base, 0), base)
    found = run.step(0, Version(0, 0))
    assert all(found[name] == found[f"{name}_raw"] for name in MISMATCH)
    assert run.learner.rescorer.versions == []
    assert "rescoring" not in run.learner.seconds


def test_versions_are_scored_as_they_were_on_the_wire(base: Path) -> None:
    text = asynchronous(base, 1, generation={"vllm_cfg": {"precision": "bfloat16"}})
    run = Run(text, base)
    rows = run.rows(0, (Version(0, 0),))
    run.step(0, Version(0, 0))
    wired = copy.deepcopy(run.sampled_by[Version(0, 0)])
    for parameter in wired.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    before = [each.detach().clone() for each in run.learner.policy.parameters()]
    run.learner.rescorer.rescore(rows, Version(0, 1))
    assert all(torch.equal(a, b) for a, b in zip(before, run.learner.policy.parameters(), strict=True))
    micro = rows.tokens.micro(torch.arange(rows.tokens.rows), CPU)
    own = torch.where(micro["mask"], micro["own"], 0.0)

    def distance(policy: Policy) -> float:
        with torch.no_grad():
            return float((own - policy(micro["ids"], micro["mask"], 1.0).logprobs).abs().mean())

    # BF16 rounds a little differently in batches of another size.
    assert distance(wired) < 0.1 * distance(run.sampled_by[Version(0, 0)])


def test_a_restore_forgets_the_versions_of_the_former_incarnation(base: Path, tmp_path: Path) -> None:
    request = trainer_pb2.TrainerSetupRequest(
        run="unit-rescoring", kind="grpo", recipe_json=asynchronous(base, 2), checkpoint_dir=str(tmp_path),
        fence=types_pb2.Fence(epoch=1), seed=5,
    )  # fmt: skip
    session = Session(request, CPU)
    try:
        groups = step_groups("r", 0)
        session.train(0, build_rows(manifest("r", 0, groups), groups, kind="grpo", max_length=32))
        assert session.learner.rescorer.versions == [Version(0, 0)]
        for incarnation, held in ((0, [Version(0, 0)]), (1, [])):
            version = types_pb2.PolicyVersion(incarnation=incarnation, number=1)
            session.stage(trainer_pb2.StageWeightsRequest(run="unit-rescoring", version=version))
            assert session.learner.rescorer.versions == held
        groups = step_groups("r", 1)
        session.train(1, build_rows(manifest("r", 1, groups), groups, kind="grpo", max_length=32))
        assert session.learner.rescorer.versions == [Version(1, 1)]
    finally:
        session.close()


def test_a_number_of_two_incarnations_in_one_sample_is_unknown() -> None:
    groups = step_groups("r", 0)
    for each in groups[0].trajectories:
        each.policy_versions.extend(types_pb2.PolicyVersion(incarnation=i, number=0) for i in (0, 1))
    groups[1].trajectories[0].policy_versions.append(types_pb2.PolicyVersion(incarnation=3, number=0))
    rows = build_rows(manifest("r", 0, groups), groups, kind="grpo", max_length=32)
    first = rows.row_of_token < len(groups[0].trajectories)
    assert rows.incarnations[first].eq(-1).all()
    told = rows.row_of_token == len(groups[0].trajectories)
    assert rows.incarnations[told & (rows.numbers == 0)].eq(3).all()
    assert rows.of_version(Version(3, 0)).sum() == _sampled(groups[1])


def _sampled(group: buffer_pb2.TrajectoryGroup) -> int:
    return group.trajectories[0].columns[0].shape[0] - PROMPT
