"""From a finished episode to operations: prompt the extractor, read its answer, embed what it wrote. Touches no bank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from crl.manager.ops import THINKING_OPENS, Op, OpLimits, parse_ops, token_spans
from crl.manager.records import Distilled, DistilRequest, Generation, UnitKey, Write
from crl.protocols import Embedder, Engine
from crl.seeds import derive_seed
from crl.tokens import ChatRenderer
from crl.types import Sampling, Segment

PromptWriter = Callable[[DistilRequest], Sequence[Segment]]
"""Writes the extractor's prompt; it numbers `request.shown` from 1, in order. Raises `RolloutError` where there can be none."""


@dataclass(frozen=True, slots=True)
class DistilSettings:
    """max_tokens, temperature: of the extractor's sampling. key_text_weight: w ≥ 0 of an entry's key, unit(embed(goal) + w·embed(text));
    **ours**. None = embed(text) alone, as in the paper. limits: of what one answer may hold.

    For w < 1 the key's cosine to its own goal is at least √(1 − w²), whatever the text.
    """

    max_tokens: int = 4096
    temperature: float = 1.0
    key_text_weight: float | None = None
    limits: OpLimits = field(default_factory=OpLimits)

    def __post_init__(self) -> None:
        if self.key_text_weight is not None and not self.key_text_weight >= 0:
            raise ValueError(f"key_text_weight must not be negative, not {self.key_text_weight}")


class Distiller:
    """Sampling draws come from `seed` and the request's id alone, so a repeated request samples the same."""

    def __init__(
        self, engine: Engine, embedder: Embedder, renderer: ChatRenderer, prompt: PromptWriter, settings: DistilSettings, seed: int
    ) -> None:
        self._engine, self._embedder, self._renderer, self._prompt = engine, embedder, renderer, prompt
        self._settings, self._seed = settings, seed

    async def distil(self, request: DistilRequest) -> Distilled:
        """Raises `RolloutError` when the request cannot be distilled, `TransientError` when it may be another time, `EngineError` when
        the engine is gone."""
        text = self._renderer.text(self._prompt(request))
        prompt = self._renderer.encode(text)
        sampling = Sampling(self._settings.max_tokens, self._renderer.stop_ids, self._settings.temperature)
        extractor = self._engine.version
        draw = derive_seed(self._seed, "distil", request.id)
        completion = await self._engine.generate(prompt, sampling, rng=draw)

        sampled = completion.ids[:-1] if completion.finish == "stop" else completion.ids
        opened = text.rstrip().endswith(THINKING_OPENS)
        parsed = parse_ops(self._renderer.decode(sampled), len(request.shown), thinking=opened, limits=self._settings.limits)
        # Mapped apart from the ops: the first op begins with the token that the head ends before.
        ((head, _),) = token_spans(self._renderer.decode, sampled, [(parsed.head, parsed.head + 1)])
        spans = token_spans(self._renderer.decode, sampled, [op.span for op in parsed.ops])
        writes = await self._writes(request, parsed.ops, spans)
        generation = Generation(request.id, extractor, prompt, completion, head)
        return Distilled(request, generation, writes, len(parsed.ops) - len(writes), parsed.dropped)

    @property
    def keys_name(self) -> str:
        """How `keys` are made; vectors of another name do not compare with them."""
        weight = self._settings.key_text_weight
        return self._embedder.name if weight is None else f"{self._embedder.name}: goal + {weight} text"

    async def keys(self, entries: Sequence[tuple[str, str]]) -> NDArray[np.float32]:
        """What entries of (goal, text) are found by: float32 [len(entries), dim], unit norm."""
        weight = self._settings.key_text_weight
        texts = await self._embedder.embed([text for _, text in entries])
        if weight is None:
            return texts
        keys = await self._embedder.embed([goal for goal, _ in entries]) + weight * texts
        return keys / np.maximum(np.linalg.norm(keys, axis=1, keepdims=True), 1e-12)

    async def _writes(self, request: DistilRequest, ops: Sequence[Op], spans: Sequence[tuple[int, int]]) -> tuple[Write, ...]:
        writing = [(i, op, span) for i, (op, span) in enumerate(zip(ops, spans, strict=True)) if op.kind != "return"]
        vectors = await self.keys([(request.task.goal, op.text) for _, op, _ in writing]) if writing else ()
        return tuple(Write(i, op.text, span, vector, _target(request, op)) for (i, op, span), vector in zip(writing, vectors, strict=True))


def _target(request: DistilRequest, op: Op) -> UnitKey | None:
    if op.target is None:
        return None
    use = request.shown[op.target].use
    return UnitKey(use.uid, use.version)
