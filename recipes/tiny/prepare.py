"""Makes everything the demo trains on: a random small model, its tokenizer and the rows.

    python recipes/tiny/prepare.py --out build/tiny --seed 0

Tasks are one-digit sums and differences from reasoning-gym (`chain_sum` and `basic_arithmetic`), asked in
several ways. The worked examples for the warm start come from a *careless pupil*, who often drops the minus
sign or the carried ten. Imitation learns those slips too; a verifier that only says right or wrong
then has to correct them. That is what the demo shows.

Invariants: the same seed writes the same bytes. No question of ``validation.jsonl`` occurs in
``train.jsonl`` or ``sft.jsonl``. Every answer is one integer, in plain digits. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import reasoning_gym
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VALIDATION_ROWS = 420
DRAWS_PER_TASK = 4000
SLIP_PROBABILITY = 0.75
# Each question is answered several times, with slips of their own: the model is to err, not to learn one
# wrong answer by heart.
ANSWERS_PER_QUESTION = 8
VOCABULARY = 400
MAX_POSITIONS = 256

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
TASKS: dict[str, dict[str, Any]] = {
    "chain_sum": _ONE_DIGIT,
    "basic_arithmetic": _ONE_DIGIT
    | {
        "operators": ("+", "-"),
        "allow_parentheses": False,
        "allow_negation": False,
        "format_style": "natural",
    },
}


@dataclass(frozen=True)
class Problem:
    """One question with its right answer."""

    task: str
    question: str
    answer: str


def draw_problems(task: str, seed: int) -> list[Problem]:
    """The distinct questions among DRAWS_PER_TASK draws, shuffled."""
    data = reasoning_gym.create_dataset(task, size=DRAWS_PER_TASK, seed=seed + 1, **TASKS[task])
    answers = {entry["question"]: entry["answer"] for entry in (data[i] for i in range(DRAWS_PER_TASK))}
    problems = [Problem(task, question, answer) for question, answer in answers.items()]
    random.Random(f"{seed}:{task}").shuffle(problems)
    return problems


def compact(problems: Iterable[Problem]) -> list[Problem]:
    """The same questions, with no space around the sign."""
    return [
        Problem(each.task, each.question.replace(" + ", "+").replace(" - ", "-"), each.answer)
        for each in problems
    ]


def split(by_task: list[list[Problem]], rows: int) -> tuple[list[Problem], list[Problem]]:
    """(training, held out): each task gives its share of ``rows`` held-out questions."""
    total = sum(map(len, by_task))
    shares = [round(len(problems) * rows / total) for problems in by_task]
    held_out = [problems[:share] for problems, share in zip(by_task, shares, strict=True)]
    training = [problems[share:] for problems, share in zip(by_task, shares, strict=True)]
    return list(chain(*training)), list(chain(*held_out))


def careless(answer: str) -> str:
    """What the pupil writes after a slip: no minus sign, or the last digit without the carried ten."""
    if answer.startswith("-"):
        return answer.removeprefix("-")
    return answer[-1]


def worked_examples(problems: Iterable[Problem], seed: int) -> Iterator[dict[str, Any]]:
    """Supervised rows: ``target`` is what the pupil wrote, ``expected_answer`` stays the truth."""
    pupil = random.Random(f"{seed}:pupil")
    for problem in chain.from_iterable([problem] * ANSWERS_PER_QUESTION for problem in problems):
        slips = pupil.random() < SLIP_PROBABILITY
        yield gym_row(problem) | {"target": careless(problem.answer) if slips else problem.answer}


def gym_row(problem: Problem) -> dict[str, Any]:
    """One row in NeMo Gym's form."""
    return {
        "responses_create_params": {"input": [{"role": "user", "content": problem.question}]},
        "expected_answer": problem.answer,
        "verifier": "exact_answer",
        "agent_ref": {"type": "responses_api_agents", "name": "single_turn"},
        "task": problem.task,
    }


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def train_tokenizer(problems: Iterable[Problem]) -> Tokenizer:
    """Byte-level BPE in which a word of the questions is one token and every digit stands alone."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d| ?[^\s\d]+|\s"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (f"{problem.question}\nuser\nassistant\n{problem.answer}" for problem in problems)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_base(out: Path, tokenizer: Tokenizer, seed: int) -> None:
    """Write a randomly initialised model and its tokenizer as one Hugging Face directory."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(model_config(fast)).float()
    model.generation_config = GenerationConfig(eos_token_id=fast.eos_token_id, pad_token_id=fast.pad_token_id)
    model.save_pretrained(out)
    fast.save_pretrained(out)


def model_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """About 0.44 million parameters, in a shape that every engine supports."""
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )


def main() -> None:
    """Write base/, sft.jsonl, train.jsonl and validation.jsonl below --out."""
    parser = argparse.ArgumentParser(description="Make the demo's model and rows.")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write into")
    parser.add_argument("--seed", type=int, default=0, help="decides model, rows and split")
    parser.add_argument("--held-out", type=int, default=VALIDATION_ROWS, help="rows to validate on")
    parser.add_argument("--compact", action="store_true", help="ask each question without spaces too")
    arguments = parser.parse_args()
    out, seed = arguments.out, arguments.seed
    out.mkdir(parents=True, exist_ok=True)
    transformers.utils.logging.disable_progress_bar()

    by_task = [draw_problems(task, seed) for task in TASKS]
    if arguments.compact:
        # In the same order: neither form of a held-out question is trained on.
        by_task += [compact(problems) for problems in by_task]
    training, held_out = split(by_task, arguments.held_out)
    random.Random(f"{seed}:order").shuffle(training)
    save_base(out / "base", train_tokenizer(training), seed)
    write_rows(out / "sft.jsonl", worked_examples(training, seed))
    write_rows(out / "train.jsonl", map(gym_row, training))
    write_rows(out / "validation.jsonl", map(gym_row, held_out))
    print(f"{out}: {len(training)} training rows, {len(held_out)} held-out rows, tasks {', '.join(TASKS)}")


if __name__ == "__main__":
    main()
