"""The extractor as the manager speaks to it: a prompt in, operations out, with what is trained on later."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from crl.manager.ops import THINKING_OPENS, Op, ParsedOps, Span, token_spans
from crl.manager.records import Generation
from crl.protocols import Engine
from crl.seeds import derive_seed
from crl.tokens import ChatRenderer
from crl.types import Sampling, Segment

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
    """max_tokens, temperature: of its sampling. Draws come from `seed` and the answer's name alone: a repeat samples the same."""

    def __init__(self, engine: Engine, renderer: ChatRenderer, *, max_tokens: int, temperature: float, seed: int) -> None:
        self._engine, self._renderer, self._seed = engine, renderer, seed
        self._sampling = Sampling(max_tokens, renderer.stop_ids, temperature)

    def tokens(self, segments: Sequence[Segment]) -> int:
        """How long a prompt of these segments is."""
        return len(self._renderer.encode(self._renderer.text(segments)))

    async def answer(self, purpose: str, name: str, segments: Sequence[Segment], parse: Parser) -> Answer:
        """name: becomes the generation's id, unique within the bank.

        Raises `RolloutError` when the engine cannot serve this request, `EngineError` when it is gone.
        """
        text = self._renderer.text(segments)
        prompt = self._renderer.encode(text)
        version = self._engine.version
        completion = await self._engine.generate(prompt, self._sampling, rng=derive_seed(self._seed, purpose, name))

        sampled = completion.ids[:-1] if completion.finish == "stop" else completion.ids
        parsed = parse(self._renderer.decode(sampled), text.rstrip().endswith(THINKING_OPENS))
        # Mapped apart from the ops: the first op begins with the token that the head ends before.
        ((head, _),) = token_spans(self._renderer.decode, sampled, [(parsed.head, parsed.head + 1)])
        spans = token_spans(self._renderer.decode, sampled, [op.span for op in parsed.ops])
        return Answer(Generation(name, version, prompt, completion, head), parsed.ops, tuple(spans), parsed.dropped)
