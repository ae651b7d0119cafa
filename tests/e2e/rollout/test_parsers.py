"""vLLM's own tool and reasoning parsers behind ours."""

from __future__ import annotations

import json

import pytest

from protos.headrace.v1 import types_pb2
from rollout_svc.engine.parsers import make_parser
from rollout_svc.turns.parse import AnswerParser
from services.runtime.errors import InvalidInput
from tests.e2e.rollout.tiny import make_tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(180)]
STOP, LENGTH = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]
HERMES = 'Look.<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>'
CODER = (
    "Look.<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def parse(tokenizer, text, finish, *, tool=None, reasoning=None, tools=TOOLS):
    parser = make_parser(tokenizer, tool, reasoning)
    answers = AnswerParser(tokenizer, stop_ids=[tokenizer.eos_token_id], parser=parser)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return answers.parse(ids, finish, tools=tools)


@pytest.mark.parametrize(("name", "text"), [("hermes", HERMES), ("qwen3_coder", CODER)])
def test_a_tool_call_is_found(tokenizer, name, text):
    message = parse(tokenizer, text + "<|im_end|>", STOP, tool=name)
    (call,) = message.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Rome", "days": 3})
    assert message.content == "Look."


@pytest.mark.parametrize("cut", [10, 30])
def test_half_a_tool_call_is_none(tokenizer, cut):
    assert not parse(tokenizer, CODER[:-cut], LENGTH, tool="qwen3_coder").tool_calls


def test_reasoning_is_taken_out_before_tools_are_looked_for(tokenizer):
    text = "<think>hm</think>" + HERMES
    message = parse(tokenizer, text, STOP, tool="hermes", reasoning="qwen3")
    assert (message.reasoning, message.content.strip()) == ("hm", "Look.")
    assert [call.name for call in message.tool_calls] == ["weather"]


def test_without_tools_the_text_stays_text(tokenizer):
    message = parse(tokenizer, HERMES, STOP, tool="hermes", tools=None)
    assert message.content == HERMES
    assert not message.tool_calls


def test_an_unknown_parser_is_named_with_the_nearest(tokenizer):
    with pytest.raises(InvalidInput, match="Did you mean hermes"):
        make_parser(tokenizer, "hermez", None)
    with pytest.raises(InvalidInput, match="reasoning_parser"):
        make_parser(tokenizer, None, "qwen33")
