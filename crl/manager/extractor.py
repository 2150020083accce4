"""The extractor as the manager speaks to it: a prompt in, operations out, with what is trained on later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from crl.manager.ops import THINKING_OPENS, Op, ParsedOps, Span, token_spans
from crl.manager.records import Generation
from crl.protocols import Engine
from crl.seeds import derive_seed
from crl.tokens import ChatRenderer
from crl.types import Completion, Sampling, Segment

T = TypeVar("T")

Parser = Callable[[str, bool], ParsedOps]
"""Reads a completion; the second argument: its prompt opened the thinking."""


@dataclass(frozen=True, slots=True)
class Answer:
    """ops: those that stand; spans: the tokens [start, stop) of each in the generation; dropped: the refused ones by reason."""

    generation: Generation
    ops: tuple[Op, ...]
    spans: tuple[Span, ...]
    dropped: Mapping[str, int]


class Extractor:
    """max_tokens, temperature: of its sampling; threaded: see `ManagerSettings`. Draws come from `seed` and the answer's name alone: a
    repeat samples the same."""

    def __init__(
        self,
        engine: Engine,
        renderer: ChatRenderer,
        *,
        max_tokens: int,
        temperature: float,
        seed: int,
        threaded: bool = False,
    ) -> None:
        self._engine, self._renderer, self._seed, self._threaded = engine, renderer, seed, threaded
        self._desk = asyncio.Lock()
        self._sampling = Sampling(max_tokens, renderer.stop_ids, temperature)

    def tokens(self, segments: Sequence[Segment]) -> int:
        """How long a prompt of these segments is."""
        return len(self._renderer.encode(self._renderer.text(segments)))

    async def aside(self, work: Callable[[], T]) -> T:
        """What `work` returns, which writes or reads what the extractor does: milliseconds of tokenising for a long episode."""
        if not self._threaded:
            return work()
        async with (
            self._desk
        ):  # one at a time: several threads would keep the interpreter's lock from the event loop
            return await asyncio.to_thread(work)

    async def answer(
        self, purpose: str, name: str, segments: Sequence[Segment], parse: Parser
    ) -> Answer:
        """name: becomes the generation's id, unique within the bank.

        Raises `RolloutError` when the engine cannot serve this request, `EngineError` when it is gone.
        """
        text, prompt = await self.aside(partial(self._rendered, segments))
        version = self._engine.version
        completion = await self._engine.generate(
            prompt, self._sampling, rng=derive_seed(self._seed, purpose, name)
        )
        thinking = text.rstrip().endswith(THINKING_OPENS)
        parsed, head, spans = await self.aside(partial(self._read, completion, parse, thinking))
        return Answer(
            Generation(name, version, prompt, completion, head), parsed.ops, spans, parsed.dropped
        )

    def _rendered(self, segments: Sequence[Segment]) -> tuple[str, tuple[int, ...]]:
        text = self._renderer.text(segments)
        return text, self._renderer.encode(text)

    def _read(
        self, completion: Completion, parse: Parser, thinking: bool
    ) -> tuple[ParsedOps, int, tuple[Span, ...]]:
        """Return what was parsed, the tokens that `Generation.head` counts, and each op's tokens.

        The last op's tokens include the rest of the answer and its stop token: nothing else would
        teach an answer to end. They do not if something refused follows, nor if the token limit cut
        the answer, which then has no end to be taught.
        """
        decode, ended = self._renderer.decode, completion.finish == "stop"
        sampled = completion.ids[:-1] if ended else completion.ids
        text = decode(sampled)
        parsed = parse(text, thinking)
        # Mapped apart from the ops: the first op begins with the token that the head ends before.
        ((head, _),) = token_spans(decode, sampled, [(parsed.head, parsed.head + 1)])
        # A cut answer's last token stands where its end should be: there the head ends before it.
        if ended and parsed.head == len(text):
            head = len(sampled)  # the stop token came too early
        spans = token_spans(decode, sampled, [op.span for op in parsed.ops])
        if ended and parsed.closed and spans:
            spans[-1] = (spans[-1][0], len(completion.ids))
        return parsed, head, tuple(spans)
