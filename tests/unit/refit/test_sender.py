from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from refit_bridge import faults
from refit_bridge.checksum import checksum
from services.runtime.errors import InvalidInput

torch = pytest.importorskip("torch")
from refit_bridge.sender import HuggingFaceSource, ShmSender, StagedWeights, TensorSource  # noqa: E402

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.full((5,), 1.00390625), "n": torch.tensor(7)}


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[ShmSender]:
    made = ShmSender("r", chunk_bytes=24, root=tmp_path)
    yield made
    made.close()
    assert list(tmp_path.iterdir()) == []


def raw(staged: StagedWeights, root: Path) -> dict[str, bytes]:
    data = (root / staged.shm_name).read_bytes()
    return {s.name: data[s.offset : s.offset + s.nbytes] for chunk in staged.chunks for s in chunk}


def test_bytes_types_and_checksums_are_those_of_the_wire(sender: ShmSender, tmp_path: Path):
    staged = sender.stage(0, 1, TensorSource(TENSORS), torch.bfloat16)
    found = raw(staged, tmp_path)
    assert [(s.name, s.dtype, s.shape) for s in staged.plan] == [
        ("a", "bfloat16", (2, 3)), ("b", "bfloat16", (5,)), ("n", "int64", ()),
    ]  # fmt: skip
    assert torch.frombuffer(bytearray(found["b"]), dtype=torch.bfloat16).tolist() == [1.0] * 5
    assert np.frombuffer(found["n"], np.int64).tolist() == [7]
    for chunk in staged.chunks:
        for piece in chunk:
            assert piece.checksum == checksum(found[piece.name])
            assert piece.offset % 64 == 0
    assert [len(chunk) for chunk in staged.chunks] == [2, 1]
    response = staged.response()
    assert response.version.digest == staged.digest
    assert response.plan_hash == staged.plan_hash


def test_staging_again_returns_the_first_answer_whatever_the_weights_are_by_now(sender: ShmSender):
    first = sender.stage(0, 1, TensorSource(TENSORS), torch.float32)
    changed = {name: tensor + 1 for name, tensor in TENSORS.items()}
    assert sender.stage(0, 1, TensorSource(changed), torch.float32) is first
    second = sender.stage(0, 2, TensorSource(changed), torch.float32)
    assert second.plan_hash == first.plan_hash
    assert second.digest != first.digest


def test_the_committed_version_and_its_successor_are_held_and_no_more(sender: ShmSender, tmp_path: Path):
    names = [sender.stage(0, n, TensorSource(TENSORS), torch.float32).shm_name for n in (1, 2, 3)]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(names[1:])
    assert sender.release(0, 2)
    assert not sender.release(0, 2)
    assert [p.name for p in tmp_path.iterdir()] == [names[2]]


def test_a_new_sender_sweeps_what_a_dead_one_left(sender: ShmSender, tmp_path: Path):
    sender.stage(0, 1, TensorSource(TENSORS), torch.float32)
    assert len(list(tmp_path.iterdir())) == 1
    ShmSender("r", root=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_faults_damage_what_they_name_and_nothing_else(
    sender: ShmSender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    good = raw(sender.stage(0, 1, TensorSource(TENSORS), torch.float32), tmp_path)
    monkeypatch.setenv(faults.VARIABLE, "corrupt:a@2, omit:b@2")
    bad = sender.stage(0, 2, TensorSource(TENSORS), torch.float32)
    found = raw(bad, tmp_path)
    assert set(found) == {"a", "n"}
    sums = {s.name: s.checksum for chunk in bad.chunks for s in chunk}
    assert sums["a"] == checksum(good["a"]) != checksum(found["a"])
    assert sums["n"] == checksum(found["n"])
    assert set(raw(sender.stage(0, 3, TensorSource(TENSORS), torch.float32), tmp_path)) == set(TENSORS)


@pytest.mark.parametrize("text", ["corrupt", "spoil:a", "omit:a@x"])
def test_a_fault_that_cannot_be_read_is_refused(text: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(faults.VARIABLE, text)
    with pytest.raises(InvalidInput, match="is not a fault"):
        faults.active("omit", 1)


def test_a_fault_that_hits_nothing_is_refused(sender: ShmSender, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(faults.VARIABLE, "corrupt:nothing")
    with pytest.raises(InvalidInput, match="no tensor nothing"):
        sender.stage(0, 1, TensorSource(TENSORS), torch.float32)


@pytest.mark.parametrize("tied", [True, False])
def test_a_hugging_face_model_travels_in_checkpoint_names(tied: bool):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, moe_intermediate_size=8, num_experts=2,
        num_experts_per_tok=1, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        tie_word_embeddings=tied,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    named = {item.name: item for item in HuggingFaceSource(model)}
    assert tuple(named["model.layers.0.mlp.experts.1.gate_proj.weight"].tensor.shape) == (8, 16)
    assert ("lm_head.weight" in named) is not tied
    assert not any("gate_up_proj" in name or "inv_freq" in name for name in named)


def test_buffers_travel_in_their_own_type():
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))
            self.register_buffer("bias", torch.ones(2))
            self.config = None

        _weight_conversions: list = []  # noqa: RUF012

    named = {item.name: item.castable for item in HuggingFaceSource(Model())}
    assert named == {"weight": True, "bias": False}
