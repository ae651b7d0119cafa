"""Rendering: the prefix is never touched, and a finished conversation tokenises as it was lived."""

from __future__ import annotations

import pytest

from protos.headrace.v1 import types_pb2
from rollout_svc.turns.masks import mask_conversation
from rollout_svc.turns.messages import parse_template_kwargs, parse_tools, to_chat
from rollout_svc.turns.render import Context, Renderer
from services.runtime.errors import InvalidInput, Unsupported
from tests.e2e.rollout.tiny import make_tokenizer

PLAIN = Context(None, {})
# Drops the thinking of all but the last assistant message, as Qwen3's own template does.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n</think>\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REWRITING = "{{ messages | length }}" + FORGETFUL


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def renderer(tokenizer):
    return Renderer(tokenizer, stop_ids=[tokenizer.eos_token_id])


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def test_the_first_prompt_is_the_template_with_the_opening(renderer, tokenizer):
    prompt = renderer.prompt([user("Hi")], PLAIN)
    assert tokenizer.decode(prompt) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_finished_answer_is_continued_without_a_second_end_of_turn(renderer, tokenizer):
    prompt = renderer.prompt([user("Hi")], PLAIN)
    answer = [*tokenizer.encode("Yes", add_special_tokens=False), tokenizer.eos_token_id]
    suffix = renderer.suffix(prompt + answer, [user("And?")], PLAIN)
    whole = renderer.prompt([user("Hi"), assistant("Yes"), user("And?")], PLAIN)
    assert prompt + answer + suffix == whole


def test_an_answer_cut_by_length_gets_its_end_of_turn(renderer, tokenizer):
    prompt = renderer.prompt([user("Hi")], PLAIN)
    cut = tokenizer.encode("Ye", add_special_tokens=False)
    suffix = renderer.suffix(prompt + cut, [user("And?")], PLAIN)
    assert suffix[0] == tokenizer.eos_token_id
    assert prompt + cut + suffix == renderer.prompt([user("Hi"), assistant("Ye"), user("And?")], PLAIN)


def test_sampled_ids_survive_when_the_text_would_tokenise_otherwise(renderer, tokenizer):
    """Half of a two-byte character: decoding and encoding it again would give other ids."""
    odd = tokenizer.encode("é", add_special_tokens=False)[:1]
    assert tokenizer.encode(tokenizer.decode(odd), add_special_tokens=False) != odd
    prefix = renderer.prompt([user("Hi")], PLAIN) + odd + [tokenizer.eos_token_id]
    suffix = renderer.suffix(prefix, [{"role": "tool", "content": "5", "tool_call_id": "a"}], PLAIN)
    assert tokenizer.decode(suffix) == "\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_hides_the_answer_is_refused(tokenizer):
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    renderer = Renderer(tokenizer, stop_ids=[1], chat_template=template)
    with pytest.raises(Unsupported, match="exactly once"):
        renderer.suffix([5], [user("x")], PLAIN)


def test_what_a_template_raises_is_the_callers_fault(tokenizer):
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidInput, match="roles must alternate"):
        Renderer(tokenizer, stop_ids=[1], chat_template=template).prompt([user("x")], PLAIN)


@pytest.mark.parametrize("template", [None, FORGETFUL])
def test_the_mask_is_on_what_the_assistant_wrote_and_its_end_of_turn(tokenizer, template):
    renderer = Renderer(tokenizer, stop_ids=[tokenizer.eos_token_id], chat_template=template)
    chat = [user("a"), assistant("bc"), user("d"), assistant("e")]
    masked = mask_conversation(renderer, chat, PLAIN, opening=False)
    assert tokenizer.decode(masked.ids) == renderer.text(chat, PLAIN, opening=False)
    marked = [token for token, on in zip(masked.ids, masked.mask, strict=True) if on]
    thinking = "<think>\n</think>\n" if template else ""
    assert tokenizer.decode(marked) == f"bc<|im_end|>{thinking}e<|im_end|>"
    assert [s.start for s in masked.segments] == _starts(masked.segments)
    assert sum(s.length for s in masked.segments) == len(masked.ids) == len(masked.mask)
    sources = [s.source for s in masked.segments]
    assert sources[0] == types_pb2.SEGMENT_SOURCE_PROMPT
    assert sources[1] == types_pb2.SEGMENT_SOURCE_SAMPLED


def test_supervised_ids_equal_the_ids_of_the_same_turns(renderer, tokenizer):
    chat = [user("a"), assistant("bc"), user("d"), assistant("e")]
    masked = mask_conversation(renderer, chat, PLAIN, opening=False)
    lived = renderer.prompt(chat[:1], PLAIN)
    lived += [*tokenizer.encode("bc", add_special_tokens=False), tokenizer.eos_token_id]
    lived += renderer.suffix(lived, chat[2:3], PLAIN)
    assert masked.ids[: len(lived)] == lived


def test_a_prompt_without_an_answer_has_no_mask(renderer, tokenizer):
    masked = mask_conversation(renderer, [user("a")], PLAIN, opening=True)
    assert masked.ids == renderer.prompt([user("a")], PLAIN)
    assert not any(masked.mask)
    assert [s.source for s in masked.segments] == [types_pb2.SEGMENT_SOURCE_PROMPT]


def test_a_template_that_rewrites_history_is_refused(tokenizer):
    renderer = Renderer(tokenizer, stop_ids=[tokenizer.eos_token_id], chat_template=REWRITING)
    with pytest.raises(Unsupported, match="rewrites"):
        mask_conversation(renderer, [user("a"), assistant("b")], PLAIN, opening=False)


def test_messages_keep_absent_parts_absent():
    call = types_pb2.ToolCall(id="c", name="f", arguments='{"x": 1}')
    broken = types_pb2.ToolCall(id="d", name="g", arguments='{"x": ')
    chat = to_chat(
        [
            types_pb2.Message(role="user", content="q"),
            types_pb2.Message(role="assistant", tool_calls=[call, broken]),
            types_pb2.Message(role="tool", content="r", tool_call_id="c"),
        ]
    )
    assert chat[0] == {"role": "user", "content": "q"}
    assert [c["function"]["arguments"] for c in chat[1]["tool_calls"]] == [{"x": 1}, '{"x": ']
    assert chat[2]["tool_call_id"] == "c"


def test_tools_of_the_responses_form_become_the_templates_form():
    row = '[{"type": "function", "name": "f", "parameters": {}, "strict": true}]'
    nested = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert parse_tools(row) == nested
    assert parse_tools(str(nested).replace("'", '"')) == nested
    assert parse_tools("") is None
    with pytest.raises(InvalidInput, match="array"):
        parse_tools('{"a": 1}')
    with pytest.raises(InvalidInput, match="object"):
        parse_template_kwargs("[]")


def _starts(segments):
    at, found = 0, []
    for segment in segments:
        found.append(at)
        at += segment.length
    return found
