"""From a finished episode to operations: prompt the extractor, read its answer, embed what it wrote. Touches no bank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from crl.manager.embed import Keys
from crl.manager.extractor import Answer, Extractor
from crl.manager.faults import target_span
from crl.manager.ops import Op, OpLimits, ParsedOps, parse_ops
from crl.manager.records import Distilled, DistilRequest, UnitKey, Vote, Write
from crl.types import ExperienceUse, Segment

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
    """prompt: what the extractor is told of an episode; votes: it is asked for them too."""

    def __init__(
        self,
        extractor: Extractor,
        keys: Keys,
        prompt: PromptWriter,
        limits: OpLimits,
        *,
        votes: bool,
    ) -> None:
        self._extractor, self._keys, self._prompt, self._limits, self._votes = (
            extractor,
            keys,
            prompt,
            limits,
            votes,
        )

    async def distil(self, request: DistilRequest) -> Distilled:
        """Raises `RolloutError` when the request cannot be distilled, `TransientError` when it may be another time, `EngineError` when
        the engine is gone."""

        def parse(completion: str, thinking: bool) -> ParsedOps:
            parsed = parse_ops(
                completion,
                len(request.shown),
                thinking=thinking,
                votes=self._votes,
                limits=self._limits,
            )
            return _one_word_each(completion, parsed, [hit.use for hit in request.shown])

        segments = await self._extractor.aside(partial(self._prompt, request))
        answer = await self._extractor.answer("distil", request.id, segments, parse)
        writes, votes = await self._writes(request, answer), tuple(_votes(request, answer))
        returned = sum(op.kind == "return" for op in answer.ops)
        return Distilled(request, answer.generation, writes, returned, answer.dropped, votes)

    async def _writes(self, request: DistilRequest, answer: Answer) -> tuple[Write, ...]:
        writing = [(i, op) for i, op in enumerate(answer.ops) if op.kind in ("add", "update")]
        vectors = await self._keys.embed([(request.task.goal, op.text) for _, op in writing])
        return tuple(
            Write(i, op.text, answer.spans[i], vector, _targets(request, op))
            for (i, op), vector in zip(writing, vectors, strict=True)
        )


def _one_word_each(completion: str, parsed: ParsedOps, uses: Sequence[ExperienceUse]) -> ParsedOps:
    """Of the updates of one experience the first stands, whatever numbers they give it, and of the votes on it; no vote where it is
    updated too, since the new version begins without votes, and none on words that are not its own."""
    named: set[UnitKey] = set()
    refused: dict[Op, str] = {}
    for op in sorted(parsed.ops, key=lambda op: op.is_vote):  # an update outweighs a vote before it
        for use in (uses[target] for target in op.targets):
            if op.is_vote and use.reworded:
                refused[op] = "vote on other words"
            elif _source(use) in named:
                refused[op] = "target named before"
            else:
                named.add(_source(use))
    ops = tuple(op for op in parsed.ops if op not in refused)
    head, closed = parsed.head, parsed.closed and not (refused and parsed.ops[-1] in refused)
    if parsed.ops and not ops:
        first = parsed.ops[0].span
        target = target_span(completion, first)
        head = (target or first)[1] - 1
    dropped = Counter(parsed.dropped) + Counter(refused.values())
    return replace(parsed, ops=ops, dropped=dropped, head=head, closed=closed)


def _votes(request: DistilRequest, answer: Answer) -> Iterable[Vote]:
    for i, op in enumerate(answer.ops):
        if op.is_vote:
            (unit,) = _targets(request, op)
            yield Vote(i, unit, 1 if op.kind == "up" else -1)


def _targets(request: DistilRequest, op: Op) -> tuple[UnitKey, ...]:
    return tuple(_source(request.shown[target].use) for target in op.targets)


def _source(use: ExperienceUse) -> UnitKey:
    return UnitKey(use.uid, use.version)
