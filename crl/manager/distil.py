"""From a finished episode to operations: prompt the extractor, read its answer, embed what it wrote. Touches no bank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from crl.manager.embed import Keys
from crl.manager.extractor import Answer, Extractor
from crl.manager.ops import Op, OpLimits, ParsedOps, parse_ops
from crl.manager.records import Distilled, DistilRequest, UnitKey, Write
from crl.types import Segment

PromptWriter = Callable[[DistilRequest], Sequence[Segment]]
"""Writes the extractor's prompt; it numbers `request.shown` from 1, in order. Raises `RolloutError` where there can be none."""


@dataclass(frozen=True, slots=True)
class DistilSettings:
    """max_tokens, temperature: of the extractor's sampling. key_text_weight: see `Keys`. limits: of what one answer may hold."""

    max_tokens: int = 4096
    temperature: float = 1.0
    key_text_weight: float | None = None
    limits: OpLimits = field(default_factory=OpLimits)


class Distiller:
    """prompt: what the extractor is told of an episode."""

    def __init__(self, extractor: Extractor, keys: Keys, prompt: PromptWriter, limits: OpLimits) -> None:
        self._extractor, self._keys, self._prompt, self._limits = extractor, keys, prompt, limits

    async def distil(self, request: DistilRequest) -> Distilled:
        """Raises `RolloutError` when the request cannot be distilled, `TransientError` when it may be another time, `EngineError` when
        the engine is gone."""

        def parse(completion: str, thinking: bool) -> ParsedOps:
            return parse_ops(completion, len(request.shown), thinking=thinking, limits=self._limits)

        answer = await self._extractor.answer("distil", request.id, self._prompt(request), parse)
        writes = await self._writes(request, answer)
        return Distilled(request, answer.generation, writes, len(answer.ops) - len(writes), answer.dropped)

    async def _writes(self, request: DistilRequest, answer: Answer) -> tuple[Write, ...]:
        writing = [(i, op) for i, op in enumerate(answer.ops) if op.kind != "return"]
        vectors = await self._keys.embed([(request.task.goal, op.text) for _, op in writing])
        return tuple(
            Write(i, op.text, answer.spans[i], vector, _targets(request, op)) for (i, op), vector in zip(writing, vectors, strict=True)
        )


def _targets(request: DistilRequest, op: Op) -> tuple[UnitKey, ...]:
    uses = [request.shown[target].use for target in op.targets]
    return tuple(UnitKey(use.uid, use.version) for use in uses)
