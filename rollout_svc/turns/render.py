"""Renders messages to token ids with the model's own chat template.

Invariants
- What was seen is a prefix of the next prompt: later turns render only what is new and splice it behind the
  exact ids so far; sampled ids are never re-tokenised.
- Text is tokenised in the pieces in which a rollout meets it (prompt, answer, what comes between), so that a
  finished conversation and the same conversation lived turn by turn have the same prompt ids.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollout_svc.turns.messages import Chat
from services.runtime.errors import InvalidInput, Unsupported

# Plain letters: no template trims, escapes or tokenises specially what it does not know.
SENTINEL = "HEADRACEASSISTANTTURN"


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that rendering uses."""

    def apply_chat_template(self, conversation: Chat, **kwargs: Any) -> Any:
        """Render a conversation."""

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        """Token ids of a text."""

    def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str:
        """Text of token ids."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a template sees besides the messages."""

    tools: Chat | None
    kwargs: dict[str, Any]


class Renderer:
    """Renders for one tokenizer. Thread-safe as far as its tokenizer is."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop_ids: Collection[int],
        chat_template: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = frozenset(stop_ids)
        self._template = chat_template
        self._kwargs = template_kwargs or {}

    def prompt(self, messages: Chat, context: Context) -> list[int]:
        """Ids of the first turn's prompt: all messages and the assistant's opening."""
        if not messages:
            raise InvalidInput("The first turn has no messages", where="messages")
        return self.encode(self.text(messages, context, opening=True))

    def suffix(self, prefix: Sequence[int], messages: Chat, context: Context) -> list[int]:
        """Ids that continue ``prefix`` (which ends with the policy's answer) by ``messages``."""
        if not messages:
            return []
        ids = self.encode(self.after_answer(messages, context, opening=True))
        # An answer cut by length lacks its end of turn; a finished one brought it along.
        if ids and prefix and prefix[-1] == ids[0] and ids[0] in self.stop_ids:
            return ids[1:]
        return ids

    def after_answer(self, messages: Chat, context: Context, *, opening: bool) -> str:
        """What the template writes after an assistant's content that is followed by ``messages``."""
        around = [{"role": "user", "content": "."}, {"role": "assistant", "content": SENTINEL}]
        text = self.text([*around, *messages], context, opening=opening)
        if text.count(SENTINEL) != 1:
            raise Unsupported(
                "The chat template does not show an assistant's content exactly once",
                where="chat template",
                do="Use a template that keeps the content of earlier assistant messages.",
            )
        return text.rpartition(SENTINEL)[2]

    def text(self, messages: Chat, context: Context, *, opening: bool) -> str:
        """The template's text; raises InvalidInput with the template's own complaint."""
        # Templates signal bad input by raising whatever Jinja or their own code raises.
        try:
            rendered = self.tokenizer.apply_chat_template(
                messages,
                tools=context.tools,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=opening,
                **{**self._kwargs, **context.kwargs},
            )
        except Exception as exc:
            raise InvalidInput(f"The chat template refuses: {exc}", where="messages") from exc
        return str(rendered)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``; special tokens come from the template alone."""
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []
