"""The learner on a tiny real model: gradients are independent of the split, resumed runs equal whole ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protos.headrace.v1 import trainer_pb2, types_pb2
from services.runtime.errors import Internal
from tests.e2e.trainer.fake_buffer import manifest, step_groups
from tests.e2e.trainer.model import make_model, recipe
from trainer_svc.config import load_config
from trainer_svc.data.rows import StepRows, build_rows
from trainer_svc.learner import Learner
from trainer_svc.models.batching import TokenRows, plan_micro_batches
from trainer_svc.models.policy import Policy
from trainer_svc.session import Session
from trainer_svc.versions import Version

CPU = torch.device("cpu")
BASE = Version(0, 0)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "base")


def rows_of(step: int, kind: str = "grpo") -> StepRows:
    groups = step_groups("r", step)
    return build_rows(manifest("r", step, groups), groups, kind=kind, max_length=32)  # type: ignore[arg-type]


def change(text: str, **sections: dict[str, Any]) -> str:
    tree = json.loads(text)
    for name, values in sections.items():
        tree.setdefault(name, {}).update(values)
    return json.dumps(tree)


def gradient(base: Path, rows: StepRows, micro_rows: int, **policy: Any) -> torch.Tensor:
    """The gradient of one optimizer step, as plain SGD with lr 1 and no clipping shows it."""
    settings = {
        "train_global_batch_size": 16,
        "train_micro_batch_size": micro_rows,
        "optimizer": {"name": "SGD", "kwargs": {"lr": 1.0}},
        "scheduler": [],
        "max_grad_norm": None,
        **policy,
    }
    learner = Learner(load_config(recipe(base, **settings)), str(base), CPU)
    before = torch.cat([each.detach().flatten().clone() for each in learner.policy.parameters()])
    learner.train(rows, BASE)
    return before - torch.cat([each.detach().flatten() for each in learner.policy.parameters()])


def permuted(rows: StepRows, order: torch.Tensor, padding: int = 0) -> StepRows:
    """The same rows in another order, each with ``padding`` untrained tokens more."""
    starts, lengths = rows.tokens.starts, rows.tokens.lengths

    def moved(flat: torch.Tensor) -> torch.Tensor:
        parts = [flat[starts[row] : starts[row] + lengths[row]] for row in order.tolist()]
        return torch.cat([torch.cat([part, flat.new_zeros(padding)]) for part in parts])

    columns = {name: moved(flat) for name, flat in rows.tokens.columns.items()}
    return StepRows(
        TokenRows(lengths[order] + padding, columns),
        rows.rewards[order], rows.groups[order], rows.truncated[order], rows.prompts[order],
        moved(rows.numbers), moved(rows.incarnations),
    )  # fmt: skip


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def test_gradients_do_not_depend_on_micro_batches_order_or_padding(base: Path) -> None:
    whole = gradient(base, rows_of(0), 16)
    assert whole.norm() > 0
    assert relative(gradient(base, rows_of(0), 4), whole) <= 1e-5
    assert relative(gradient(base, rows_of(0), 1), whole) <= 1e-5
    dynamic = {"enabled": True, "train_mb_tokens": 50, "sequence_length_round": 1}
    assert relative(gradient(base, rows_of(0), 4, dynamic_batching=dynamic), whole) <= 1e-5
    shuffled = torch.randperm(16, generator=torch.Generator().manual_seed(3))
    assert relative(gradient(base, permuted(rows_of(0), shuffled), 4), whole) <= 1e-5
    assert relative(gradient(base, permuted(rows_of(0), shuffled, padding=9), 3), whole) <= 1e-5


def test_gradients_do_not_depend_on_the_heads_chunks(base: Path) -> None:
    whole = gradient(base, rows_of(0), 16)
    assert relative(gradient(base, rows_of(0), 16, logprob_chunk_size=7), whole) <= 1e-5


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_are_those_of_the_models_own_logits(base: Path, temperature: float) -> None:
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    ids = torch.randint(1, 64, (3, 11), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = Policy(network, chunk_tokens=4)(ids, torch.ones_like(ids, dtype=torch.bool), temperature)
        logits = network(input_ids=ids).logits.double() / temperature
    expected = torch.log_softmax(logits, -1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(found.logprobs[:, 1:].double(), expected, atol=1e-5, rtol=0)
    assert found.logprobs[:, 0].eq(0).all()
    assert found.correct[:, 1:].equal(logits[:, :-1].argmax(-1) == ids[:, 1:])


def test_a_loss_that_is_not_finite_changes_nothing(base: Path) -> None:
    learner = Learner(load_config(recipe(base)), str(base), CPU)
    before = [each.detach().clone() for each in learner.policy.parameters()]
    rows = rows_of(0)
    rows.rewards[0] = float("inf")
    with pytest.raises(Internal, match="nothing was applied"):
        learner.train(rows, BASE)
    assert not learner.touched
    assert learner.optimizer_steps == 0
    assert all(
        torch.equal(one, other) for one, other in zip(before, learner.policy.parameters(), strict=True)
    )


def test_several_optimizer_steps_make_the_ratio_leave_one(base: Path) -> None:
    config = load_config(
        recipe(base, train_global_batch_size=4, optimizer={"kwargs": {"lr": 0.02}}, scheduler=[])
    )
    learner = Learner(config, str(base), CPU)
    metrics = learner.train(rows_of(0), BASE)
    assert learner.optimizer_steps == 4
    assert metrics["probs_ratio_max"] > 1.01
    assert metrics["global_valid_toks"] == float(rows_of(0).tokens.columns["mask"].sum())
    assert metrics["global_valid_seqs"] == 16


def test_the_learning_rate_follows_rl_steps_not_optimizer_steps(base: Path) -> None:
    learner = Learner(load_config(recipe(base)), str(base), CPU)
    rates = [learner.train(rows_of(step), BASE)["lr"] for step in range(5)]
    assert rates == pytest.approx([0.0003, 0.0012, 0.0021, 0.003, 0.003])


def test_supervised_training_learns_its_rows(base: Path) -> None:
    learner = Learner(load_config(recipe(base, "sft", scheduler=[])), str(base), CPU)
    metrics = [learner.train(rows_of(0, "sft"), BASE) for _ in range(80)]
    assert metrics[0]["loss"] == pytest.approx(4.2, abs=0.3)  # log 64
    assert metrics[-1]["loss"] < 0.5
    assert metrics[-1]["token_accuracy"] > 0.9


def test_overlong_rows_do_not_train_but_count_in_the_baseline(base: Path) -> None:
    text = change(recipe(base), grpo={"overlong_filtering": True})
    learner = Learner(load_config(text), str(base), CPU)
    rows = rows_of(0)
    rows.truncated[:3] = True
    metrics = learner.train(rows, BASE)
    assert metrics["global_valid_seqs"] == 13
    assert rows.tokens.columns["advantages"][0] != 0


def test_rows_with_a_large_mismatch_are_masked(base: Path) -> None:
    text = change(recipe(base), grpo={"seq_logprob_error_threshold": 20.0})
    learner = Learner(load_config(text), str(base), CPU)
    rows = rows_of(0)
    start = int(rows.tokens.starts[2])
    rows.tokens.columns["generation"][start : start + int(rows.tokens.lengths[2])] = -12.0
    assert learner.train(rows, BASE)["num_masked_seqs_by_logprob_error"] == 1


def session(base: Path, folder: Path, text: str | None = None) -> Session:
    request = trainer_pb2.TrainerSetupRequest(
        run="unit-session",
        kind="grpo",
        recipe_json=text or recipe(base),
        checkpoint_dir=str(folder),
        fence=types_pb2.Fence(epoch=1),
        seed=5,
    )
    return Session(request, CPU)


def test_a_resumed_run_equals_an_uninterrupted_one(base: Path, tmp_path: Path) -> None:
    whole = session(base, tmp_path / "a")
    expected = [whole.train(step, rows_of(step)).metrics for step in range(6)]
    first = session(base, tmp_path / "b")
    for step in range(3):
        first.train(step, rows_of(step))
    first.save("{}", {})
    second = session(base, tmp_path / "b")
    assert second.completed_steps == 3
    for step in range(3, 6):
        found = second.train(step, rows_of(step)).metrics
        assert found["lr"] == expected[step]["lr"]
        assert found["loss"] == pytest.approx(expected[step]["loss"], abs=1e-6)
        assert found["grad_norm"] == pytest.approx(expected[step]["grad_norm"], rel=1e-6)


def test_a_damaged_checkpoint_is_passed_over(base: Path, tmp_path: Path) -> None:
    first = session(base, tmp_path)
    paths = []
    for step in range(2):
        first.train(step, rows_of(step))
        paths.append(Path(first.save("{}", {}).path))
    weights = paths[1] / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    second = session(base, tmp_path)
    assert second.completed_steps == 1
    second.train(1, rows_of(1))
    second.train(2, rows_of(2))
    assert Path(second.save("{}", {}).path).name == "step_3"


def test_retention_keeps_the_latest_ones(base: Path, tmp_path: Path) -> None:
    one = session(base, tmp_path)
    for step in range(4):
        one.train(step, rows_of(step))
        one.save("{}", {})
    assert sorted(path.name for path in tmp_path.glob("*_*") if path.is_dir()) == ["step_3", "step_4"]
    assert json.loads((tmp_path / "latest_checkpoint_status.json").read_text()) == {"last_checkpoint_step": 4}


def test_an_export_and_a_checkpoint_load_in_transformers(base: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    one = session(base, tmp_path / "checkpoints")
    one.train(0, rows_of(0))
    saved = Path(one.save("{}", {}).path) / "model"
    one.export(str(tmp_path / "export"))
    one.export(str(tmp_path / "export"))
    ids = torch.arange(1, 10)[None]
    wanted = one.learner.policy.network(input_ids=ids).logits
    for folder in (saved, tmp_path / "export"):
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        torch.testing.assert_close(loaded(input_ids=ids).logits, wanted)
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"):
            assert (folder / name).is_file()


def test_scores_are_in_the_wire_dtype(base: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    generation = {"vllm_cfg": {"precision": "bfloat16"}}
    one = session(base, tmp_path, recipe(base, generation=generation))
    ids = torch.arange(1, 10)
    (found,) = one.score([ids], 1.0)
    wired = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        logits = wired(input_ids=ids[None]).logits.float()
    expected = torch.log_softmax(logits, -1)[0, :-1].gather(-1, ids[1:, None]).squeeze(-1)
    torch.testing.assert_close(found[1:], expected)
    one.train(0, rows_of(0))
    assert not torch.equal(one.score([ids], 1.0)[0], found)
    assert one.learner.policy.network.dtype == torch.float32


def test_micro_batches_sort_by_length_and_keep_their_budget() -> None:
    lengths = [3, 9, 4, 9, 2, 8]
    by_rows = plan_micro_batches(lengths, range(6), max_rows=2, max_tokens=None)
    assert [part.tolist() for part in by_rows] == [[1, 3], [5, 2], [0, 4]]
    by_tokens = plan_micro_batches(lengths, range(6), max_rows=1, max_tokens=18)
    assert [part.tolist() for part in by_tokens] == [[1, 3], [5, 2], [0, 4]]
    alone = plan_micro_batches(lengths, range(6), max_rows=1, max_tokens=5)
    assert [len(part) for part in alone] == [1, 1, 1, 1, 1, 1]


def test_rows_stand_in_the_manifests_order() -> None:
    groups = step_groups("r", 0)
    wanted = manifest("r", 0, groups)
    wanted.groups[0].samples.reverse()
    rows = build_rows(wanted, groups, kind="grpo", max_length=32)
    expected = [np.frombuffer(groups[0].trajectories[at].columns[0].data, "<i4") for at in (3, 2, 1, 0)]
    start = 0
    for each in expected:
        assert rows.tokens.columns["ids"][start : start + len(each)].tolist() == each.tolist()
        start += len(each)
    assert rows.rewards[:4].tolist() == [1.0, 0.0, 1.0, 0.0]
