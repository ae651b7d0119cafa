"""Seeds, sampling parameters, ids and the parsing of answers."""

from __future__ import annotations

import json

import pytest

from protos.headrace.v1 import types_pb2
from rollout_svc.engine.tokenizer import stop_ids
from rollout_svc.turns.ids import ids_bytes, ids_from
from rollout_svc.turns.parse import AnswerParser, Parsed
from rollout_svc.turns.sampling import REQUIRED, check_sampling
from rollout_svc.turns.seeds import turn_seed
from services.runtime.errors import InvalidInput, Unsupported
from tests.e2e.rollout.tiny import make_tokenizer

FULL = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_new_tokens": 8}
STOP, LENGTH = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH


def test_seeds_are_stable_and_differ_in_every_part():
    """The first value is part of the contract: changing it changes every run."""
    assert turn_seed(1, 2, 3, 4) == 674030317121052651
    seeds = {turn_seed(a, b, c, d) for a in range(3) for b in range(3) for c in range(3) for d in range(3)}
    assert len(seeds) == 81
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert 0 <= turn_seed(2**64 - 1, 2**64 - 1, 2**32 - 1, 2**32 - 1) < 2**63


@pytest.mark.parametrize("name", REQUIRED)
def test_every_sampling_parameter_is_explicit(name):
    params = types_pb2.SamplingParams(**{k: v for k, v in FULL.items() if k != name})
    with pytest.raises(InvalidInput, match=f"sampling.{name} is not set"):
        check_sampling(params, book="train")


def test_required_names_are_the_optional_fields_of_the_contract():
    fields = types_pb2.SamplingParams.DESCRIPTOR.fields
    assert set(REQUIRED) == {field.name for field in fields if field.has_presence}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.005), ("temperature", -1.0), ("temperature", 2.5), ("temperature", float("nan")),
        ("top_p", 0.0), ("top_p", 1.1), ("top_k", -2), ("min_p", 1.5), ("max_new_tokens", 0),
    ],
)  # fmt: skip
def test_what_the_engine_would_clamp_or_refuse_is_refused_here(name, value):
    with pytest.raises(InvalidInput, match=f"sampling.{name}"):
        check_sampling(types_pb2.SamplingParams(**{**FULL, name: value}), book="validation/0")


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_truncated_sampling_never_trains(cut):
    params = types_pb2.SamplingParams(**{**FULL, **cut})
    with pytest.raises(Unsupported, match="not supported for turns that train"):
        check_sampling(params, book="train")
    assert check_sampling(params, book="validation/3").truncated
    greedy = types_pb2.SamplingParams(**{**FULL, **cut, "temperature": 0.0})
    assert not check_sampling(greedy, book="train").truncated


def test_floats_come_back_as_the_recipe_wrote_them():
    assert (
        check_sampling(types_pb2.SamplingParams(**{**FULL, "temperature": 0.7}), book="train").temperature
        == 0.7
    )


def test_ids_are_checked():
    assert ids_from(ids_bytes([1, 2, 3]), where="x") == [1, 2, 3]
    with pytest.raises(InvalidInput, match="int32"):
        ids_from(b"abc", where="prefix_ids")
    with pytest.raises(InvalidInput, match="negative"):
        ids_from(ids_bytes([-1]), where="prefix_ids")


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def parser_of(tokenizer, parser=None):
    return AnswerParser(tokenizer, stop_ids=[tokenizer.eos_token_id], parser=parser)


def test_the_end_of_turn_is_no_content(tokenizer):
    ids = tokenizer.encode("ab<|im_end|>", add_special_tokens=False)
    assert parser_of(tokenizer).parse(ids, STOP).content == "ab"
    assert parser_of(tokenizer).parse(ids[:-1], LENGTH).content == "ab"
    colon = tokenizer.encode("ab:", add_special_tokens=False)
    assert parser_of(tokenizer).parse(colon, STOP, stop_ids=colon[-1:]).content == "ab"


def test_a_stop_string_is_no_content(tokenizer):
    ids = tokenizer.encode("x END y END!", add_special_tokens=False)
    assert parser_of(tokenizer).parse(ids, STOP, stop_string="END").content == "x END y "


def test_a_turn_cut_by_length_makes_no_tool_call(tokenizer):
    def calls(text, ids, tools, kwargs):
        return Parsed("said", "thought", [types_pb2.ToolCall(name="f", arguments="{}")])

    parser = parser_of(tokenizer, calls)
    ids = tokenizer.encode("call", add_special_tokens=False)
    stopped, cut = parser.parse(ids, STOP), parser.parse(ids, LENGTH)
    assert [c.name for c in stopped.tool_calls] == ["f"]
    assert not cut.tool_calls
    assert (cut.content, cut.reasoning) == ("said", "thought")


def test_stop_ids_come_from_all_three_places(tmp_path, tokenizer):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9], "top_k": 3}))
    assert stop_ids(tokenizer, str(tmp_path)) == sorted({tokenizer.eos_token_id, 7, 8, 9})
