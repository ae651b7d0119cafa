"""Rendering and parsing of one engine, off the event loop.

Invariants
- One thread: Hugging Face tokenizers may not be used by two at once, and templates hold the interpreter lock
  anyway.
- The samples of a group share their prompt, so prompts are remembered (``CACHED_PROMPTS``).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from protos.headrace.v1 import rollout_pb2, types_pb2
from rollout_svc.turns.ids import ids_bytes
from rollout_svc.turns.masks import Masked, mask_conversation
from rollout_svc.turns.messages import parse_template_kwargs, parse_tools, to_chat
from rollout_svc.turns.parse import AnswerParser
from rollout_svc.turns.render import Context, Renderer
from services.runtime.errors import InvalidInput

CACHED_PROMPTS = 1024
Result = TypeVar("Result")


class Rendering:
    """Serves Render, and the text side of Turn."""

    def __init__(self, renderer: Renderer, parser: AnswerParser) -> None:
        self.renderer = renderer
        self._parser = parser
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="render")
        self._prompts: OrderedDict[tuple[bytes, str, str], list[int]] = OrderedDict()

    async def rendered(self, request: rollout_pb2.TurnRequest, prefix: Sequence[int]) -> list[int]:
        """What the turn adds to ``prefix``: the prompt on the first turn, environment text later."""
        if prefix:
            return await self._run(lambda: self._suffix(request, prefix))
        key = (
            b"".join(message.SerializeToString(deterministic=True) + b"\0" for message in request.messages),
            request.tools_json,
            request.chat_template_kwargs_json,
        )
        if key not in self._prompts:
            self._prompts[key] = await self._run(lambda: self._prompt(request))
        found = self._prompts[key]
        self._prompts.move_to_end(key)
        while len(self._prompts) > CACHED_PROMPTS:
            self._prompts.popitem(last=False)
        return found

    async def message(
        self,
        request: rollout_pb2.TurnRequest,
        ids: Sequence[int],
        finish: types_pb2.FinishReason.ValueType,
        stop_string: str,
    ) -> types_pb2.Message:
        """The message of sampled ``ids``."""
        message = await self._run(
            lambda: self._parser.parse(
                ids,
                finish,
                stop_string=stop_string,
                stop_ids=request.sampling.stop_token_ids,
                tools=parse_tools(request.tools_json),
                template_kwargs=parse_template_kwargs(request.chat_template_kwargs_json),
            )
        )
        # Numbered, not random as in vLLM: a repeated turn is the same to the last byte.
        for number, call in enumerate(message.tool_calls):
            call.id = f"call_{request.turn}_{number}"
        return message

    async def render(self, request: rollout_pb2.RenderRequest) -> rollout_pb2.RenderResponse:
        """Render whole conversations."""
        response = rollout_pb2.RenderResponse()
        for index, conversation in enumerate(request.conversations):
            try:
                masked = await self._run(lambda item=conversation: self._mask(item))  # type: ignore[misc]
            except InvalidInput as exc:
                exc.where = f"conversations[{index}], {exc.where}"
                raise
            response.rendered.append(_to_rendered(masked))
        return response

    def close(self) -> None:
        """End the thread; what is queued is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _prompt(self, request: rollout_pb2.TurnRequest) -> list[int]:
        return self.renderer.prompt(to_chat(request.messages), _context(request))

    def _suffix(self, request: rollout_pb2.TurnRequest, prefix: Sequence[int]) -> list[int]:
        return self.renderer.suffix(prefix, to_chat(request.messages), _context(request))

    def _mask(self, item: rollout_pb2.Conversation) -> Masked:
        chat = to_chat(item.messages)
        return mask_conversation(self.renderer, chat, _context(item), opening=item.add_generation_prompt)

    async def _run(self, action: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._pool, action)


def _context(request: rollout_pb2.TurnRequest | rollout_pb2.Conversation) -> Context:
    return Context(parse_tools(request.tools_json), parse_template_kwargs(request.chat_template_kwargs_json))


def _to_rendered(masked: Masked) -> rollout_pb2.Rendered:
    return rollout_pb2.Rendered(ids=ids_bytes(masked.ids), mask=bytes(masked.mask), segments=masked.segments)
