"""From a finished episode to operations: prompt the extractor, read its answer, embed what it wrote. Touches no bank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from crl.manager.ops import THINKING_OPENS, Op, OpLimits, parse_ops, token_spans
from crl.manager.records import Distilled, DistilRequest, Generation, UnitKey, Write
from crl.protocols import Embedder, Engine
from crl.seeds import derive_seed
from crl.tokens import ChatRenderer
from crl.types import Sampling, Segment

PromptWriter = Callable[[DistilRequest], Sequence[Segment]]
"""Writes the extractor's prompt; it numbers `request.shown` from 1, in order."""


@dataclass(frozen=True, slots=True)
class DistilSettings:
    """max_tokens, temperature: of the extractor's sampling. key_with_goal: an entry is found by its goal and text, not by its text
    alone. limits: of what one answer may hold."""

    max_tokens: int = 4096
    temperature: float = 1.0
    key_with_goal: bool = False
    limits: OpLimits = field(default_factory=OpLimits)


class Distiller:
    """Sampling draws come from `seed` and the request's id alone, so a repeated request samples the same."""

    def __init__(
        self, engine: Engine, embedder: Embedder, renderer: ChatRenderer, prompt: PromptWriter, settings: DistilSettings, seed: int
    ) -> None:
        self._engine, self._embedder, self._renderer, self._prompt = engine, embedder, renderer, prompt
        self._settings, self._seed = settings, seed

    async def distil(self, request: DistilRequest) -> Distilled:
        """Raises `RolloutError` when the engine cannot serve this request, `EngineError` when it is gone."""
        text = self._renderer.text(self._prompt(request))
        prompt = self._renderer.encode(text)
        sampling = Sampling(self._settings.max_tokens, self._renderer.stop_ids, self._settings.temperature)
        extractor = self._engine.version
        draw = derive_seed(self._seed, "distil", request.id)
        completion = await self._engine.generate(prompt, sampling, session=f"distil/{request.id}", rng=draw)

        sampled = completion.ids[:-1] if completion.finish == "stop" else completion.ids
        opened = text.rstrip().endswith(THINKING_OPENS)
        parsed = parse_ops(self._renderer.decode(sampled), len(request.shown), thinking=opened, limits=self._settings.limits)
        # Mapped apart from the ops: the first op begins with the token that the head ends before.
        ((head, _),) = token_spans(self._renderer.decode, sampled, [(parsed.head, parsed.head + 1)])
        spans = token_spans(self._renderer.decode, sampled, [op.span for op in parsed.ops])
        writes = await self._writes(request, parsed.ops, spans)
        generation = Generation(request.id, extractor, prompt, completion, head)
        return Distilled(request, generation, writes, len(parsed.ops) - len(writes), parsed.dropped)

    def key(self, goal: str, text: str) -> str:
        """What an entry is found by."""
        return f"{goal}\n{text}" if self._settings.key_with_goal else text

    async def _writes(self, request: DistilRequest, ops: Sequence[Op], spans: Sequence[tuple[int, int]]) -> tuple[Write, ...]:
        writing = [(i, op, span) for i, (op, span) in enumerate(zip(ops, spans, strict=True)) if op.kind != "return"]
        keys = [self.key(request.task.goal, op.text) for _, op, _ in writing]
        vectors = await self._embedder.embed(keys) if keys else ()
        return tuple(Write(i, op.text, span, vector, _target(request, op)) for (i, op, span), vector in zip(writing, vectors, strict=True))


def _target(request: DistilRequest, op: Op) -> UnitKey | None:
    if op.target is None:
        return None
    use = request.shown[op.target].use
    return UnitKey(use.uid, use.version)
