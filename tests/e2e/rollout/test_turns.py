"""Turns of the real engine: log-probabilities, determinism, prefixes, what must not leak in."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from protos.headrace.v1 import rollout_pb2, types_pb2
from rollout_svc.turns.ids import ids_bytes
from services.runtime.errors import InvalidInput, Unsupported
from tests.e2e.rollout.conftest import RUN, turn
from tests.e2e.rollout.tiny import make_tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]


def ids(data):
    return np.frombuffer(data, "<i4").tolist()


def logprobs(data):
    return np.frombuffer(data, "<f4")


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
async def test_logprobs_are_those_of_the_sampling_distribution(stack, reference, temperature):
    for sample in range(4):
        answer = await stack.router.Turn(turn(["What is 2 + 3?"], sample=sample, temperature=temperature))
        prompt, sampled = ids(answer.rendered_ids), ids(answer.sampled_ids)
        expected = reference(prompt + sampled, temperature)[len(prompt) :]
        assert len(sampled) > 1
        assert np.abs(logprobs(answer.logprobs) - np.array(expected)).max() < 1e-4


async def test_a_turn_depends_on_its_seed_alone(stack):
    request = turn(["Count."], group=5, sample=3, max_new_tokens=48)
    alone = await stack.router.Turn(request)
    crowd = [turn([f"Other {i}"], group=100 + i, max_new_tokens=48) for i in range(47)]
    crowded = (await asyncio.gather(*(stack.router.Turn(item) for item in [*crowd, request])))[-1]
    assert crowded.sampled_ids == alone.sampled_ids
    assert crowded.logprobs == alone.logprobs
    others = [turn(["Count."], group=5, sample=4), turn(["Count."], group=6, sample=3)]
    others += [turn(["Count."], group=5, sample=3, seed=8)]
    for other in others:
        assert (await stack.router.Turn(other)).sampled_ids != alone.sampled_ids


async def test_greedy_is_greedy(stack, reference):
    import torch

    answer = await stack.router.Turn(turn(["Go on"], temperature=0.0, max_new_tokens=40))
    prompt = torch.tensor([ids(answer.rendered_ids)])
    sequence = prompt
    for _ in ids(answer.sampled_ids):
        best = reference.model(sequence).logits[0, -1].argmax()
        sequence = torch.cat([sequence, best.reshape(1, 1)], 1)
    assert sequence[0, prompt.shape[1] :].tolist() == ids(answer.sampled_ids)


async def test_the_models_generation_config_does_not_leak_in(stack):
    """It says temperature 0.1, top_k 1, at most 3 tokens."""
    answers = [await stack.router.Turn(turn(["Say"], sample=i)) for i in range(6)]
    assert max(len(ids(a.sampled_ids)) for a in answers) > 3
    assert len({a.sampled_ids for a in answers}) == 6


async def test_later_turns_continue_the_exact_ids(stack, reference):
    first = await stack.router.Turn(turn(["One"], max_new_tokens=12))
    prefix = first.rendered_ids + first.sampled_ids
    second = await stack.router.Turn(turn(["Two"], number=1, prefix=prefix, max_new_tokens=12))
    tokenizer = make_tokenizer()
    stop = tokenizer.eos_token_id
    ended = ids(first.sampled_ids)[-1] == stop
    between = ("" if ended else "<|im_end|>") + "\n<|im_start|>user\nTwo<|im_end|>\n<|im_start|>assistant\n"
    assert ids(second.rendered_ids) == tokenizer.encode(between, add_special_tokens=False)
    whole = ids(prefix + second.rendered_ids + second.sampled_ids)
    expected = reference(whole)[-len(ids(second.sampled_ids)) :]
    assert np.abs(logprobs(second.logprobs) - np.array(expected)).max() < 1e-4


async def test_stop_token_ends_the_turn_and_is_part_of_it(stack):
    free = await stack.router.Turn(turn(["Stop"], temperature=0.0))
    stop = ids(free.sampled_ids)[4]
    cut = await stack.router.Turn(turn(["Stop"], temperature=0.0, stop_token_ids=[stop]))
    assert cut.finish_reason == types_pb2.FINISH_REASON_STOP
    assert ids(cut.sampled_ids) == ids(free.sampled_ids)[: ids(free.sampled_ids).index(stop) + 1]
    assert len(cut.logprobs) == len(cut.versions) == len(cut.sampled_ids)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_score_is_the_log_softmax_at_the_temperature(stack, reference, temperature):
    sequences = [[5, 9, 12, 40, 41, 7], list(range(3, 70))]
    request = rollout_pb2.ScoreTokensRequest(
        run=RUN, sequences=[ids_bytes(s) for s in sequences], temperature=temperature
    )
    answer = await stack.router.Score(request)
    for sequence, data in zip(sequences, answer.logprobs, strict=True):
        assert np.abs(logprobs(data) - np.array(reference(sequence, temperature))).max() < 1e-4


async def test_truncated_sampling_is_for_validation_only(stack):
    with pytest.raises(Unsupported, match="top_p"):
        await stack.router.Turn(turn(["x"], top_p=0.9))
    answer = await stack.router.Turn(turn(["x"], top_k=1, book="validation/0"))
    assert logprobs(answer.logprobs).max() == 0.0


async def test_what_cannot_be_answered_is_refused(stack):
    with pytest.raises(InvalidInput) as too_long:
        await stack.router.Turn(turn(["x" * 300]))
    assert too_long.value.reason == "PROMPT_TOO_LONG"
    with pytest.raises(InvalidInput, match="vocabulary"):
        await stack.router.Turn(turn(["x"], number=1, prefix=ids_bytes([5, 100_000])))
    with pytest.raises(InvalidInput, match="temperature"):
        await stack.router.Turn(turn(["x"], temperature=0.001))


async def test_rendered_conversations_match_what_turns_see(stack):
    answer = await stack.router.Turn(turn(["Hello"], max_new_tokens=8))
    chat = [
        types_pb2.Message(role="user", content="Hello"),
        types_pb2.Message(role="assistant", content="Hi"),
    ]
    request = rollout_pb2.RenderRequest(run=RUN, conversations=[rollout_pb2.Conversation(messages=chat)])
    rendered = (await stack.router.Render(request)).rendered[0]
    prompt = ids(answer.rendered_ids)
    assert ids(rendered.ids)[: len(prompt)] == prompt
    tokenizer = make_tokenizer()
    marked = [token for token, on in zip(ids(rendered.ids), rendered.mask, strict=True) if on]
    assert tokenizer.decode(marked) == "Hi<|im_end|>"
