"""Ids and mask of a finished conversation: what supervised training learns from.

Invariant: the mask is 1 exactly on the content of assistant messages and the end-of-turn token after it,
which is what a rollout would have sampled there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from protos.headrace.v1 import types_pb2
from rollout_svc.turns.messages import Chat
from rollout_svc.turns.render import Context, Renderer
from services.runtime.errors import Unsupported


@dataclass(slots=True)
class Masked:
    """Ids, a mask of the same length and the segments that tile them."""

    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    segments: list[types_pb2.Segment] = field(default_factory=list)

    def add(self, ids: list[int], source: types_pb2.SegmentSource.ValueType, turn: int) -> None:
        """Append one segment; empty ones are left out."""
        if not ids:
            return
        self.segments.append(
            types_pb2.Segment(source=source, start=len(self.ids), length=len(ids), turn=turn)
        )
        self.ids.extend(ids)
        self.mask.extend([int(source == types_pb2.SEGMENT_SOURCE_SAMPLED)] * len(ids))


def mask_conversation(renderer: Renderer, messages: Chat, context: Context, *, opening: bool) -> Masked:
    """Render ``messages`` as a whole and mark what the assistant wrote."""
    text = renderer.text(messages, context, opening=opening)
    masked = Masked()
    at, turn = 0, 0
    between: types_pb2.SegmentSource.ValueType = types_pb2.SEGMENT_SOURCE_PROMPT
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start = _start(renderer, messages[:index], context, text)
        tail = _tail(renderer, messages[index + 1 :], context, text, opening)
        end_ids = renderer.encode(text[len(text) - len(tail) :] if tail else "")
        masked.add(renderer.encode(text[at:start]), between, turn)
        answer = renderer.encode(text[start : len(text) - len(tail)])
        at = len(text) - len(tail)
        if end_ids and end_ids[0] in renderer.stop_ids:
            answer.append(end_ids[0])
            at += len(renderer.tokenizer.decode(end_ids[:1], skip_special_tokens=False))
        masked.add(answer, types_pb2.SEGMENT_SOURCE_SAMPLED, turn)
        between, turn = types_pb2.SEGMENT_SOURCE_ENVIRONMENT, turn + 1
    masked.add(renderer.encode(text[at:]), between, max(0, turn - 1) if at else 0)
    return masked


def _start(renderer: Renderer, before: Chat, context: Context, text: str) -> int:
    """Where the answer to ``before`` begins in ``text``."""
    prompt = renderer.text(before, context, opening=True) if before else ""
    if not before or not text.startswith(prompt):
        raise _not_incremental()
    return len(prompt)


def _tail(renderer: Renderer, after: Chat, context: Context, text: str, opening: bool) -> str:
    """What follows the answer in ``text``."""
    tail = renderer.after_answer(after, context, opening=opening)
    if not text.endswith(tail):
        raise _not_incremental()
    return tail


def _not_incremental() -> Unsupported:
    return Unsupported(
        "The chat template rewrites earlier messages when later ones follow",
        where="chat template",
        do="Use one assistant message per conversation, or a template that only appends.",
        reason="TEMPLATE_REWRITES",
    )
