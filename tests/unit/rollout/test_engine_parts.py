"""Engine arguments, versions and fencing: no engine is started here."""

from __future__ import annotations

import json

import pytest

from protos.headrace.v1 import types_pb2
from rollout_svc.engine.arguments import engine_arguments
from rollout_svc.engine.policy import read_policy
from rollout_svc.engine.versions import Phase, Versions
from services.runtime.errors import Fenced, InvalidInput, NotReady, Refused, Unsupported

VERSION = types_pb2.PolicyVersion


def policy(cfg=None, kwargs=None, **more):
    body = {"model_name": "m", "precision": "bfloat16", "max_total_sequence_length": 64, **more}
    return read_policy(
        json.dumps({**body, "generation": {"vllm_cfg": cfg or {}, "vllm_kwargs": kwargs or {}}})
    )


def arguments(found, *, cpu=True):
    return engine_arguments(found, cpu=cpu, seed=2**63, kv_cache_mib=64, max_num_seqs=16)


def test_the_generation_config_and_raw_logprobs_cannot_be_let_in():
    args = arguments(policy(kwargs={"generation_config": "auto", "logprobs_mode": "raw_logprobs"}))
    assert args["generation_config"] == "vllm"
    assert args["logprobs_mode"] == "processed_logprobs"
    with pytest.raises(Unsupported, match="sampling distribution"):
        policy({"logprobs_mode": "raw_logprobs"})


def test_precision_and_length_come_from_the_recipe():
    assert arguments(policy())["dtype"] == "float32"
    assert arguments(policy(), cpu=False)["dtype"] == "bfloat16"
    assert arguments(policy({"precision": "bfloat16"}))["dtype"] == "bfloat16"
    assert arguments(policy())["max_model_len"] == 64
    assert arguments(policy({"max_model_len": 32}))["max_model_len"] == 32
    assert 0 <= arguments(policy())["seed"] < 2**31


def test_vllm_kwargs_pass_through_and_unknown_cfg_keys_do_not():
    args = arguments(policy(kwargs={"max_num_batched_tokens": 128, "block_size": 16}))
    assert (args["max_num_batched_tokens"], args["block_size"]) == (128, 16)
    with pytest.raises(InvalidInput, match="Unknown key max_model_length"):
        arguments(policy({"max_model_length": 5}))


def test_parsers_are_found_in_both_places_and_not_passed_on():
    named = policy(kwargs={"tool_parser": "hermes", "reasoning_parser": "qwen3"})
    assert (named.tool_parser, named.reasoning_parser) == ("hermes", "qwen3")
    assert not {"tool_parser", "reasoning_parser"} & set(arguments(named))
    nemo = policy({"http_server_serving_chat_kwargs": {"tool_parser": "qwen3_coder"}})
    assert nemo.tool_parser == "qwen3_coder"


def test_a_missing_chat_template_file_is_named():
    with pytest.raises(InvalidInput, match=r"no chat template nowhere\.jinja"):
        policy(tokenizer={"chat_template": "nowhere.jinja"})


def paused():
    versions = Versions("r")
    versions.paused = True
    return versions


def test_nothing_is_served_before_a_commit():
    versions = Versions("r")
    with pytest.raises(NotReady) as unserved:
        versions.serving()
    assert unserved.value.reason == "NO_VERSION"
    with pytest.raises(NotReady):
        versions.scoring(probe=False)
    assert versions.scoring(probe=True) == VERSION()
    versions.commit("r", 1, VERSION())
    assert versions.serving() == VERSION()


def test_an_update_takes_the_version_away_until_its_commit():
    versions = paused()
    versions.commit("r", 1, VERSION())
    versions.begin(2, VERSION(number=1))
    versions.phase = Phase.UPDATING
    with pytest.raises(NotReady):
        versions.serving()
    with pytest.raises(NotReady):
        versions.scoring(probe=True)
    with pytest.raises(Refused, match="half an update"):
        versions.may_resume()
    with pytest.raises(Refused, match="did not finish"):
        versions.commit("r", 2, VERSION(number=1))
    versions.phase = Phase.CLEAN
    assert versions.scoring(probe=True).number == 1
    with pytest.raises(NotReady):
        versions.serving()
    with pytest.raises(Refused, match="carries"):
        versions.commit("r", 2, VERSION(number=2))
    versions.commit("r", 2, VERSION(number=1, digest="d"))
    assert versions.serving().digest == "d"
    versions.commit("r", 2, VERSION(number=1, digest="d"))


def test_generations_fence():
    versions = paused()
    versions.begin(5, VERSION(number=1))
    with pytest.raises(Fenced):
        versions.begin(4, VERSION(number=1))
    with pytest.raises(Fenced):
        versions.begin(5, VERSION(number=1))
    with pytest.raises(Refused, match="No update 5"):
        versions.expect(5)  # its begin never succeeded
    versions.phase = Phase.UPDATING
    versions.expect(5)
    with pytest.raises(Fenced):
        versions.expect(4)
    versions.begin(6, VERSION(number=1))
    assert versions.phase is Phase.BROKEN


def test_the_salt_tells_runs_incarnations_and_numbers_apart():
    versions = Versions("r")
    salts = {versions.salt(VERSION(incarnation=i, number=n)) for i in range(3) for n in range(3)}
    assert len(salts) == 9
